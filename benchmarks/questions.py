"""Everyday questions to the documentation of the standard library: correct answers and time, next to other searches.

    python benchmarks/questions.py --json benchmarks/results/questions_cpu.json

60 questions in the words of a user, each with the names of the correct entries. They were written before any search ran, and
are not changed. Four of the names turned out to be no entries, so no search can answer the question about csv.DictReader: it
has no docstring. Every contender searches the same entries. BM25 splits identifiers into words, and stems; that of the hybrid
search does not stem.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import bm25s
import Stemmer
from embeddings import minilm
from harness import finish
from sentence_transformers import SentenceTransformer
from transformers import HfArgumentParser

import neobert_hf
from neobert_hf.cli import embedding_model
from neobert_hf.demo.documentation import Entry, collect_documentation
from neobert_hf.demo.ranking import words_of
from neobert_hf.demo.search import DocumentationIndex

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


@dataclass
class QuestionsArguments:
    """Arguments of the benchmark."""

    num_questions: int = field(
        default=len(QUESTIONS), metadata={"help": "Number of questions to ask, from the first on."}
    )
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


def answered(name: str, prepare: Callable[[], Callable[[str], list[str]]], questions: list[str]) -> tuple[dict, dict]:
    """Questions with a correct entry first and among three, the seconds, and the answers."""
    started = time.perf_counter()
    search = prepare()
    ready = time.perf_counter()
    answers, seconds = {}, []
    for question in questions:
        asked = time.perf_counter()
        answers[question] = search(question)
        seconds.append(time.perf_counter() - asked)
    is_right = [[name in QUESTIONS[question].split() for name in names] for question, names in answers.items()]
    row = {
        "search": name,
        "right_first": sum(each[0] for each in is_right),
        "right_in_three": sum(map(any, is_right)),
        "index_s": ready - started,
        "first_question_s": seconds[0],
        "question_s": statistics.median(seconds),
        "all_questions_s": sum(seconds),
    }
    return row, answers


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
    questions = list(QUESTIONS)[: arguments.num_questions]
    rows, answers, commands = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        entries = collect_documentation(False, arguments.package.split(","), folder)
        reading_s = time.perf_counter() - started

        def index(
            model: SentenceTransformer, num_candidates: int = 0, hybrid: bool = False
        ) -> Callable[[str], list[str]]:
            options = dict(show_progress=False, cache_dir=folder, hybrid=hybrid)
            made = DocumentationIndex(model, arguments.package.split(","), num_candidates, **options)
            return lambda question: [hit.entry.name for hit in made.search(question, top_k=3)]

        contenders = {}
        if arguments.others:
            contenders["BM25"] = lambda: bm25(entries)
            contenders["all-MiniLM-L6-v2"] = lambda: index(minilm())
        for count in arguments.num_candidates:
            name = f"mini, cosine, then tokens of {count}" if count else "mini, cosine"
            contenders[name] = lambda count=count: index(embedding_model(neobert_hf.MINI_MODEL_PATH), count)
        contenders["mini, hybrid"] = lambda: index(embedding_model(neobert_hf.MINI_MODEL_PATH), hybrid=True)
        for name, prepare in contenders.items():
            row, answers[name] = answered(name, prepare, questions)
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
        reading_s=reading_s,
        commands_s=commands,
        answers=answers,
    )


if __name__ == "__main__":
    main()
