"""Everyday questions to the documentation of the standard library: correct answers and time, next to other searches.

    python benchmarks/questions.py --json benchmarks/results/questions_cpu_float32.json

Questions in the words of a user, each with the names of the correct entries. They were written before any search ran, and are
not changed; some of the names turned out to be no entries. `QUESTIONS` (60) chose the last training stages of the mini model, the
two vectors of an entry, and `MENTION_BONUS`. `LATER_QUESTIONS` (50) were written after the first experiments with two vectors and
before the choice, and chose between bonuses of 0.01 and 0.015. Both chose among the stages that learned written questions. The
question about csv.DictReader led to the entries without a docstring. The mini model learned other questions to the correct
entries that have one (hub_upload/mini_questions.tsv). Questions about details are random sentences that occur in one docstring
only, and are not its first.

Every contender searches the same entries. BM25 splits identifiers into words, and stems; that of the hybrid search does not stem.
"""

import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice

import bm25s
import Stemmer
from harness import finish
from sentence_transformers import SentenceTransformer
from transformers import HfArgumentParser

import neobert_hf
from neobert_hf.cli import embedding_model
from neobert_hf.demo import search as index_module
from neobert_hf.demo.documentation import Entry, collect_documentation, first_sentence
from neobert_hf.demo.ranking import ranking, words_of
from neobert_hf.embeddings.distillation import TEACHER, open_teacher

QUESTIONS = {
    "wait a few seconds": "time.sleep asyncio.sleep",
    "sort a list by a key": "sorted list.sort",
    "count how often each word occurs": "collections.Counter",
    "the longest string in a list": "max",
    "join strings with a comma": "str.join",
    "split a string at spaces": "str.split",
    "remove whitespace from both ends of a string": "str.strip",
    "replace part of a string with another": "str.replace",
    "is this file there": "os.path.exists os.path.isfile pathlib.Path.exists pathlib.Path.is_file",
    "make a new folder": "os.mkdir os.makedirs pathlib.Path.mkdir",
    "delete a file": "os.remove os.unlink pathlib.Path.unlink",
    "delete a folder with everything in it": "shutil.rmtree",
    "copy a file to another place": "shutil.copy shutil.copy2 shutil.copyfile",
    "list the files in a directory": "os.listdir os.scandir os.walk pathlib.Path.iterdir",
    "find all files that end in .txt": "glob.glob glob.iglob pathlib.Path.glob pathlib.Path.rglob fnmatch.filter",
    "turn a dictionary into JSON text": "json.dumps json.dump json.JSONEncoder json.JSONEncoder.encode",
    "read a csv file with column names": "csv.DictReader",
    "download a web page": "urllib.request.urlopen urllib.request.urlretrieve",
    "run another program and get its output": "subprocess.run subprocess.check_output subprocess.getoutput "
    "subprocess.getstatusoutput subprocess.Popen.communicate",
    "current date and time": "datetime.datetime.now datetime.datetime.today",
    "how many days are between two dates": "datetime.timedelta datetime.timedelta.days",
    "parse a date from text": "datetime.datetime.strptime time.strptime datetime.datetime.fromisoformat "
    "datetime.date.fromisoformat",
    "pick a random item from a list": "random.choice random.choices secrets.choice",
    "shuffle a list": "random.shuffle",
    "a random whole number between two limits": "random.randint random.randrange",
    "square root of a number": "math.sqrt math.isqrt cmath.sqrt",
    "average of a list of numbers": "statistics.mean statistics.fmean",
    "round a number up": "math.ceil",
    "largest number in a list": "max heapq.nlargest",
    "add up all numbers in a list": "sum math.fsum",
    "reverse a list": "list.reverse reversed",
    "add an item to the end of a list": "list.append",
    "remove duplicates from a list": "set dict.fromkeys",
    "look up a key with a default value when it is missing": "dict.get dict.setdefault collections.defaultdict",
    "loop over a list together with its index": "enumerate",
    "go through two lists at the same time": "zip itertools.zip_longest",
    "all permutations of a list": "itertools.permutations",
    "start a function in a new thread": "threading.Thread threading.Thread.start threading.Thread.run "
    "concurrent.futures.ThreadPoolExecutor asyncio.to_thread",
    "remember the results of a function": "functools.lru_cache functools.cache",
    "length of a list": "len",
    "turn text into upper case letters": "str.upper",
    "does the text begin with a word": "str.startswith",
    "find a pattern anywhere in a text": "re.search re.findall re.finditer re.Pattern.search re.Pattern.findall "
    "re.Pattern.finditer",
    "replace text by a regular expression": "re.sub re.subn re.Pattern.sub re.Pattern.subn",
    "value of an environment variable": "os.getenv os.getenvb",
    "folder I am in": "os.getcwd pathlib.Path.cwd",
    "command line arguments of a program": "argparse argparse.ArgumentParser optparse getopt getopt.getopt",
    "hash of a file": "hashlib.file_digest",
    "encode bytes as base64": "base64.b64encode base64.standard_b64encode base64.encodebytes binascii.b2a_base64",
    "compress a folder into a zip file": "shutil.make_archive zipfile zipfile.ZipFile zipfile.ZipFile.write "
    "zipapp.create_archive",
    "temporary file that deletes itself": "tempfile.TemporaryFile tempfile.NamedTemporaryFile",
    "send an email": "smtplib.SMTP smtplib.SMTP.sendmail smtplib.SMTP.send_message smtplib",
    "connect to a sqlite database": "sqlite3.connect",
    "print an object nicely indented": "pprint pprint.pprint pprint.pp pprint.pformat pprint.PrettyPrinter",
    "ask the user to type something": "input",
    "stop the program": "sys.exit os._exit",
    "measure how long code takes": "timeit timeit.timeit timeit.Timer timeit.Timer.timeit time.perf_counter "
    "time.perf_counter_ns time.process_time",
    "write log messages to a file": "logging.FileHandler logging.basicConfig",
    "save an object to disk and load it again": "pickle pickle.dump pickle.load shelve shelve.open shelve.Shelf",
    "fractions without rounding errors": "fractions fractions.Fraction decimal.Decimal",
}

LATER_QUESTIONS = {
    "check whether two strings are nearly the same": "difflib.SequenceMatcher difflib.SequenceMatcher.ratio "
    "difflib.get_close_matches",
    "put zeros in front of a number": "str.zfill",
    "how big is a file": "os.path.getsize os.stat pathlib.Path.stat",
    "rename a file": "os.rename os.replace pathlib.Path.rename pathlib.Path.replace shutil.move",
    "file name without the folder": "os.path.basename os.path.split pathlib.PurePath.name",
    "file extension of a path": "os.path.splitext pathlib.PurePath.suffix pathlib.PurePath.suffixes",
    "turn a relative path into an absolute one": "os.path.abspath os.path.realpath pathlib.Path.absolute "
    "pathlib.Path.resolve",
    "home directory of the user": "pathlib.Path.home os.path.expanduser pathlib.Path.expanduser",
    "how much space is left on the disk": "shutil.disk_usage os.statvfs",
    "start a simple web server": "http.server http.server.HTTPServer http.server.ThreadingHTTPServer "
    "socketserver.TCPServer",
    "split a web address into its parts": "urllib.parse.urlparse urllib.parse.urlsplit",
    "escape special characters in HTML": "html.escape",
    "read settings from an ini file": "configparser configparser.ConfigParser "
    "configparser.RawConfigParser.read configparser.ConfigParser.read",
    "parse an XML file": "xml.etree.ElementTree.parse xml.dom.minidom.parse xml.sax.parse "
    "xml.etree.ElementTree.XMLParser xml.etree.ElementTree.iterparse",
    "read JSON from a string": "json.loads json.JSONDecoder json.JSONDecoder.decode",
    "unpack a tar archive": "tarfile tarfile.TarFile.extractall shutil.unpack_archive tarfile.TarFile.extract",
    "compress data with gzip": "gzip.compress gzip gzip.GzipFile zlib.compress",
    "make a random password": "secrets secrets.token_urlsafe secrets.token_hex secrets.token_bytes secrets.choice",
    "create a unique identifier": "uuid.uuid4 uuid.uuid1 uuid uuid.UUID",
    "what day of the week is a date": "datetime.date.weekday datetime.date.isoweekday calendar.weekday",
    "is this year a leap year": "calendar.isleap",
    "write a date in another format": "datetime.date.strftime datetime.datetime.strftime time.strftime",
    "seconds since 1970": "time.time datetime.datetime.timestamp time.time_ns",
    "call a function with some arguments already filled in": "functools.partial functools.partialmethod",
    "apply a function to every element": "map multiprocessing.pool.Pool.map",
    "keep only the elements that fulfil a condition": "filter",
    "are all values true": "all",
    "combine the elements of a list into one value": "functools.reduce",
    "chain several lists one after another": "itertools.chain itertools.chain.from_iterable",
    "group neighbouring elements by a key": "itertools.groupby",
    "queue where you can add at both ends": "collections.deque",
    "insert into a sorted list": "bisect.insort bisect.insort_left bisect.insort_right bisect",
    "make a deep copy of an object": "copy.deepcopy copy",
    "what type does an object have": "type isinstance",
    "list the attributes of an object": "dir vars inspect.getmembers",
    "round to two decimal places": "round decimal.Decimal.quantize",
    "greatest common divisor": "math.gcd",
    "standard deviation of some numbers": "statistics.stdev statistics.pstdev",
    "convert a string to an integer": "int",
    "decode bytes to text": "bytes.decode codecs.decode bytearray.decode",
    "wrap long lines of text": "textwrap.wrap textwrap.fill textwrap.TextWrapper textwrap",
    "run several processes in parallel": "multiprocessing.Pool multiprocessing multiprocessing.pool.Pool "
    "concurrent.futures.ProcessPoolExecutor multiprocessing.Process",
    "protect a variable from several threads": "threading.Lock threading.RLock _thread.allocate_lock",
    "ignore a certain exception": "contextlib.suppress",
    "show where an error happened": "traceback.print_exc traceback.format_exc traceback "
    "traceback.print_exception traceback.print_stack",
    "unit tests for my code": "unittest unittest.TestCase doctest",
    "step through a program to find a bug": "pdb pdb.set_trace breakpoint bdb.Bdb.set_trace pdb.Pdb",
    "which functions take the most time": "cProfile profile pstats cProfile.Profile cProfile.run profile.run "
    "pstats.Stats",
    "enter a password without showing it": "getpass.getpass getpass",
    "name of the operating system": "platform.system os.uname platform.platform platform.uname",
}

KINDS = {"everyday": QUESTIONS, "everyday, later": LATER_QUESTIONS}


@dataclass
class QuestionsArguments:
    """Arguments of the benchmark."""

    num_questions: int = field(
        default=len(QUESTIONS), metadata={"help": "Number of questions of each kind to ask, from the first on."}
    )
    num_details: int = field(default=600, metadata={"help": "Number of questions about details."})
    package: str = field(default="python", metadata={"help": "Packages to search."})
    num_candidates: list[int] = field(
        default_factory=lambda: [0, 200], metadata={"help": "Entries that the mini model reranks."}
    )
    others: bool = field(default=True, metadata={"help": "Also run BM25 and all-MiniLM-L6-v2."})
    commands: bool = field(default=True, metadata={"help": "Also time the whole command `neobert search`."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def bm25(entries: list[Entry]) -> Callable[[str], list[str]]:
    """A search by BM25: the names of the three best entries."""
    options = dict(stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False)
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize([words_of(each.full_text) for each in entries], **options), show_progress=False)

    def search(question: str) -> list[str]:
        found, _ = retriever.retrieve(bm25s.tokenize(words_of(question), **options), k=3, show_progress=False)
        return [entries[i].name for i in found[0]]

    return search


def whole_texts(model: SentenceTransformer, entries: list[Entry]) -> Callable[[str], list[str]]:
    """A search with one vector for each entry, of its whole text."""
    vectors = model.encode_document([entry.full_text for entry in entries], normalize_embeddings=True, batch_size=64)

    def search(question: str) -> list[str]:
        cosines = vectors @ model.encode_query(question, normalize_embeddings=True)
        return [entries[i].name for i in ranking(cosines)[:3]]

    return search


def detail_questions(entries: list[Entry], count: int) -> dict[str, str]:
    """Random sentences of docstrings without their first sentences, each with the name of its entry; at most `count`."""
    sentences = {
        entry.name: [
            " ".join(each.split()) for each in re.split(r"(?<=[.!?])\s+|\n\s*\n", first_sentence(entry.text)[1])
        ]
        for entry in entries
    }
    counts, found = Counter(chain.from_iterable(map(set, sentences.values()))), {}
    for entry in entries:
        clear = [
            each
            for each in sentences[entry.name]
            if counts[each] == 1 and 5 <= len(each.split()) <= 25 and each[:1].isupper() and ">>>" not in each
        ]
        if entry.module and clear:  # the topics of help() are whole chapters
            found[random.Random(entry.name).choice(clear)] = entry.name
    return dict(random.Random(0).sample(sorted(found.items()), min(count, len(found))))


def answered(
    name: str, prepare: Callable[[], Callable[[str], list[str]]], kinds: dict[str, dict[str, str]]
) -> tuple[dict, dict]:
    """For each kind of questions those with a correct entry first and among three; the seconds; and the answers."""
    started = time.perf_counter()
    search = prepare()
    row, answers, seconds = {"search": name, "index_s": time.perf_counter() - started}, {}, []
    for kind, questions in kinds.items():
        answers[kind] = {}
        for question in questions:
            asked = time.perf_counter()
            answers[kind][question] = search(question)
            seconds.append(time.perf_counter() - asked)
        is_right = [[name in correct.split() for name in answers[kind][q]] for q, correct in questions.items()]
        row[kind] = {"first": sum(each[0] for each in is_right), "in_three": sum(map(any, is_right))}
    answers.pop("details")
    return row | {"first_question_s": seconds[0], "question_s": statistics.median(seconds)}, answers


def command_seconds(folder: str, questions: list[str]) -> float:
    """Seconds of the whole process `neobert search` with its cache in a folder."""
    environment = {**os.environ, "HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "neobert_hf.cli", "search", *questions]
    started = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def main():
    """Run every measurement, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(QuestionsArguments).parse_args_into_dataclasses()
    neobert_hf.tune_allocator()
    count = arguments.num_questions
    kinds = {kind: dict(islice(of_kind.items(), count)) for kind, of_kind in KINDS.items()}
    questions = list(kinds["everyday"])
    rows, answers, commands = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        entries = collect_documentation(False, arguments.package.split(","), folder, public_api=True)
        reading_s = time.perf_counter() - started
        kinds["details"] = detail_questions(entries, arguments.num_details)

        def index(
            model: SentenceTransformer,
            num_candidates: int = 0,
            hybrid: bool = False,
            has_bonus: bool = True,
            num_tokens: int = index_module.INDEXED_TOKENS,
        ) -> Callable[[str], list[str]]:
            index_module.INDEXED_TOKENS = num_tokens
            options = dict(show_progress=False, cache_dir=folder, hybrid=hybrid)
            made = index_module.DocumentationIndex(model, arguments.package.split(","), num_candidates, **options)
            made.bonuses *= has_bonus
            return lambda question: [hit.entry.name for hit in made.search(question, top_k=3)]

        contenders = {}
        if arguments.others:
            contenders["BM25"] = lambda: bm25(entries)
            teacher = open_teacher(TEACHER, 256)  # its own length
            contenders["all-MiniLM-L6-v2"] = lambda: index(teacher)
            contenders["all-MiniLM-L6-v2, one vector for each entry"] = lambda: whole_texts(teacher, entries)
        mini = embedding_model(neobert_hf.MINI_MODEL_PATH)
        for candidates in arguments.num_candidates:
            name = f"mini, then tokens of {candidates}" if candidates else "mini"
            contenders[name] = lambda candidates=candidates: index(mini, candidates)
        for num_tokens in (32, 128):
            contenders[f"mini, first {num_tokens} tokens"] = lambda num_tokens=num_tokens: index(
                mini, num_tokens=num_tokens
            )
        contenders["mini, mentions do not count"] = lambda: index(mini, has_bonus=False)
        contenders["mini, one vector for each entry"] = lambda: whole_texts(mini, entries)
        contenders["mini, hybrid"] = lambda: index(mini, hybrid=True)
        for name, prepare in contenders.items():
            row, answers[name] = answered(name, prepare, kinds)
            if name in ("mini, mentions do not count", "mini, hybrid"):  # they read what "mini" embedded
                row["index_s"] = None
            rows.append(row)
        if arguments.commands:
            commands["three questions, nothing kept"] = command_seconds(f"{folder}/home", questions[:3])
            commands["three questions again"] = command_seconds(f"{folder}/home", questions[:3])
            commands["40 questions, all kept"] = command_seconds(f"{folder}/home", questions[:40])
    finish(
        "questions",
        rows,
        arguments,
        num_entries=len(entries),
        num_questions={kind: len(questions) for kind, questions in kinds.items()},
        reading_s=reading_s,
        commands_s=commands,
        answers=answers,
    )


if __name__ == "__main__":
    main()
