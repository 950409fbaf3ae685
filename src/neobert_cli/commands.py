"""The command `neobert`: thin commands over the public functions of neobert_hf.

This package stands beside neobert_hf, and the commands import neobert_hf when they run: `neobert --help` and the completion of
a shell do not wait for torch and transformers.

A command is a function that declares its arguments on a parser and returns the function to run with them. Its docstring is the
help. To add a command, write this function and add it to COMMANDS. The commands of SCRIPTS are the scripts of
`neobert_hf.examples`, which declare their arguments themselves; `neobert_hf/options.json` has them too, for help, checks and
completion before anything is imported.
"""

import gc
import inspect
import json
import os
import shutil
import sys
import textwrap
from argparse import SUPPRESS
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import neobert_cli
from neobert_cli.parser import Parser, add_table, typed_options

Run = Callable[..., None]
CYAN = "\x1b[36m{}\x1b[0m"


def embed(parser: Parser) -> Run:
    """Embed the texts of files.

    neobert embed texts.txt -o vectors.npy
    neobert embed reviews.csv --text_column review --normalize -o reviews.parquet
    neobert embed folder "more/*.jsonl" --model runs/embeddings -o vectors.jsonl

    A model reads the beginning of a text: the first 128 tokens in the mini model. The result counts the texts that are longer;
    --truncation error refuses them.
    After an interruption, the same command embeds what is missing: OUTPUT.vectors keeps the vectors until the output is written.
    """
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="Texts: .txt (a text in each line), .jsonl, .json, .csv, .tsv or .parquet; a folder of them; or a pattern.",
    )
    add("--output", "-o", required=True, metavar="FILE", help="File to write; see below.")
    add("--model", default=SUPPRESS, help="Embedding model: folder or Hub id. Default: the mini model of this package.")
    add("--text_column", default="text", help="Column of the texts; .txt has no columns.")
    add("--prompt_name", help="Name of the model's prompt to put before each text.")
    add("--normalize", action="store_true", help="Scale each embedding to length 1.")
    add("--max_length", type=int, help="Longest text in tokens. Default: what the model reads.")
    add("--truncation", choices=("warn", "error", "off"), default="warn", help="What is done about longer texts.")
    add("--overwrite", action="store_true", help="Replace the output of an earlier command.")
    add("--batch_size", type=int, default=64, help="Number of texts in a batch of the model.")
    parser.epilog = "An output .npy holds the embeddings; .jsonl and .parquet hold the columns text and embedding."

    def run(**options) -> None:
        from neobert_hf.embeddings.vector_files import embed_files

        print(json.dumps(embed_files(**options)))

    return run


def search(parser: Parser) -> Run:
    """Search your own files by words and by meaning.

    neobert search notes "how do I renew the certificate?"
    neobert search notes "papers/*.pdf" tickets.csv --text_column body "printer does not answer"
    neobert search notes                                      (asks for questions; an empty line ends)
    neobert search notes --json < questions.txt > answers.jsonl

    The first search embeds the passages of the files; a later one embeds only those that are new or changed.
    """
    add = parser.add_argument
    add(
        "words",
        nargs="+",
        metavar="PATH",
        help="Files, folders and patterns, then the question; without a question, the command asks for it.",
    )
    add("--top_k", type=int, default=5, help="Number of answers to a question.")
    add("--model", default=SUPPRESS, help="Embedding model: folder or Hub id. Default: the mini model of this package.")
    add("--max_length", type=int, help="Longest passage in tokens. Default: what the model reads, at most 512.")
    add("--text_column", default="text", help="Column of the texts in .jsonl, .json, .csv, .tsv and .parquet.")
    add(
        "--include",
        action="append",
        metavar="PATTERN",
        help="Files of folders to search, such as '*.py': pattern of a name, of a folder, or of a path. Repeatable.",
    )
    add(
        "--exclude",
        action="append",
        metavar="PATTERN",
        help="Files and folders to leave out, such as tests or '*.min.js'. Repeatable.",
    )
    add("--encoding", help="Encoding of all text files, such as cp1252. Default: UTF-8, or a guess, which is told.")
    add(
        "--word_weight",
        type=float,
        default=0.4,
        help="Weight of the words in the score, from 0 (only the model) to 1 (only words).",
    )
    add("--truncation", choices=("warn", "error", "off"), default="warn", help="What is done about a long question.")
    add("--json", dest="as_json", action="store_true", help="Print a line of JSON for a question, with whole passages.")
    parser.usage = "neobert search PATH [PATH ...] [QUESTION] [--ARGUMENT VALUE ...]"

    return _search


def _search(words: list[str], top_k: int, as_json: bool, **options) -> None:
    """Print the answers to the question of the command line, of a terminal, or of each line of the standard input."""
    from neobert_hf.embeddings.search import DocumentSearch, check_question

    show = _as_json if as_json else _as_text
    questions: Iterable[str] = filter(None, map(str.strip, sys.stdin))
    if len(words) > 1 and not os.path.lexists(words[-1]):
        questions = [words.pop()]
        check_question(questions[0], top_k)
    elif sys.stdin.isatty():
        questions = iter(_ask, "")
    documents = DocumentSearch(words, **options)
    print(documents.summary(), file=sys.stderr)
    for question in questions:
        print(show(question, documents.search(question, top_k)), flush=True)


def _ask() -> str:
    """A question from the terminal, where arrows edit it and find earlier ones; an empty line and Ctrl-D end."""
    with suppress(ImportError):
        import readline  # noqa: F401  (`input` uses it; Windows needs none)
    print(file=sys.stderr)
    try:
        with redirect_stdout(sys.stdout if sys.stdout.isatty() else sys.stderr):  # a file gets the answers only
            return input("question (an empty line ends): ").strip()
    except EOFError:
        print(file=sys.stderr)
        return ""


def _as_json(question: str, answers: list) -> str:
    """One line, in which JSON escapes control characters."""
    return json.dumps({"question": question, "answers": [vars(answer) for answer in answers]})


def _as_text(question: str, answers: list) -> str:
    """File and line, score, and the first lines of each passage in the width of the terminal, which shows them in color."""
    from neobert_hf.files.terminal import printable

    head = "{}"
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        head = CYAN
    width = shutil.get_terminal_size().columns
    indent = "    "
    shown = []
    for answer in answers:
        place = head.format(f"{printable(answer.file)}:{answer.line}")
        score = head.format(f"({answer.score:.2f})")
        passage = textwrap.fill(printable(answer.text), width - len(indent), max_lines=3, placeholder=" ...")
        shown.append(f"{place}  {score}\n{textwrap.indent(passage, indent)}")
    return "\n\n".join(shown)


def train_tokenizer(parser: Parser) -> Run:
    """Train the tokenizer of a corpus: an uncased WordPiece vocabulary.

    neobert train-tokenizer --files a.jsonl b.jsonl --output_dir tokenizer
    neobert train-tokenizer --dataset_name wikimedia/wikipedia --dataset_config 20231101.en --output_dir tokenizer \\
        --vocab_size 16384

    The text is read once and not kept: memory follows the number of different words, about 1 kB each.
    """
    add = parser.add_argument
    add("--output_dir", required=True, metavar="FOLDER", help="Folder to write, new or empty.")
    add("--vocab_size", type=int, default=30_522, help="Most tokens; a small text gives fewer.")
    add("--max_length", type=int, default=4096, help="Length in tokens at which it truncates.")
    _add_corpus(parser)

    def run(output_dir: str, vocab_size: int, max_length: int, **source) -> None:
        from neobert_hf.data import tokenizer_hash, write_wordpiece
        from neobert_hf.pretraining import Corpus

        tokenizer = write_wordpiece(Corpus(**source), output_dir, vocab_size, max_length)
        print(json.dumps({"folder": output_dir, "vocab_size": len(tokenizer), "sha256": tokenizer_hash(tokenizer)}))
        words = ["--tokenizer_name", output_dir, "--output_dir", "runs/documents"]
        for name, value in source.items():
            if value != parser.get_default(name):
                words += [f"--{name}", *([value] if isinstance(value, str) else value)]
        _say_next("tokenize", *words)

    return run


def tokenize(parser: Parser) -> Run:
    """Tokenize text for pretraining. Documents are stored whole; training cuts long ones.

    neobert tokenize --files a.jsonl b.jsonl --tokenizer_name google-bert/bert-base-uncased --output_dir documents
    neobert tokenize --dataset_name wikimedia/wikipedia --dataset_config 20231101.en \\
        --tokenizer_name google-bert/bert-base-uncased --output_dir documents --executor ray

    Rerun the command to resume after an interruption.
    """
    add = parser.add_argument
    add("--output_dir", required=True, metavar="FOLDER", help="Folder of the token ids.")
    add("--tokenizer_name", required=True, help="Folder or Hub id of a fast tokenizer.")
    _add_corpus(parser)
    add("--executor", choices=("local", "ray"), default="local", help="What runs the tasks: an executor of datatrove.")
    add(
        "--tasks",
        type=int,
        help="Parts of the corpus; an interrupted part begins again. Default: one for each file, 8 to 1,000.",
    )
    add("--workers", type=int, help="Tasks that run at the same time. Default: one for a core; with Ray, all.")

    add("--json", dest="as_json", action="store_true", help="Print one JSON object.")

    def run(output_dir, tokenizer_name, executor, tasks, workers, as_json, **source):
        from neobert_hf.checkpoints.tokenizer import load_tokenizer
        from neobert_hf.pretraining.corpus import Corpus
        from neobert_hf.pretraining.tokenizing import tokenize

        tokenizer = load_tokenizer(tokenizer_name)
        documents = tokenize(Corpus(**source), tokenizer, output_dir, executor, tasks, workers)
        counts = {name: documents.manifest[name] for name in ("num_documents", "num_tokens")}
        line = "{} has {num_documents:,} documents of {num_tokens:,} tokens".format(output_dir, **counts)
        print(json.dumps({"folder": output_dir, **counts}) if as_json else line)
        words = ("--documents_dir", output_dir, "--tokenizer_name", tokenizer_name, "--output_dir", "runs/pretraining")
        _say_next("pretrain-mlm", *words, "--num_held_out", str(min(1000, 1 + len(documents) // 20)))

    return run


def _add_corpus(parser: Parser) -> None:
    """Add the arguments of a `Corpus`."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--files", nargs="+", action="extend", metavar="FILE", help="Text, JSON lines, CSV, TSV or Parquet files."
    )
    source.add_argument("--dataset_name", help="Dataset of the Hub, instead of files.")
    add("--dataset_config", help="Configuration of the dataset.")
    add("--split", default="train", help="Split of the dataset.")
    add("--text_column", default="text", help="Column that holds the text.")
    add(
        "--sample_by",
        choices=("line", "paragraph", "document"),
        default="paragraph",
        help="Unit of a .txt file that is one document; blank lines separate paragraphs.",
    )


def doctor(parser: Parser) -> Run:
    """Find what is wrong with a checkpoint, and the command that mends it.

    neobert doctor runs/classifier
    neobert doctor org/name --base chandar-lab/NeoBERT
    neobert doctor runs/classifier --json

    Nothing is executed, unpickled or changed. Status 0: no error was found; 1: an error was found, or the checkpoint cannot be
    reached; 2: the command line is wrong. Remarks do not change the status.
    """
    add = parser.add_argument
    add("source", metavar="MODEL", help="Folder, or id on the Hub, whose files are downloaded without pickles.")
    add(
        "--base",
        metavar="MODEL",
        help="The model from which this one was fine-tuned: finds a fine-tuning without positions.",
    )
    add("--json", dest="as_json", action="store_true", help="Print one JSON object.")

    def run(source: str, base: str | None, as_json: bool) -> None:
        from neobert_hf.checkpoints.doctor import examine, report_lines

        report = examine(source, base)
        print(json.dumps(report) if as_json else "\n".join(report_lines(report)))
        raise SystemExit(int(not report["is_clean"]))

    return run


def convert(parser: Parser) -> Run:
    """Convert a checkpoint in another layout, or a pickle, to the published layout.

    neobert convert exported runs/model
    neobert convert model_checkpoints/100000 runs/model --base chandar-lab/NeoBERT

    The source is not changed, and no bit of its weights either. Pickles are read in a way that runs none of their code.
    """
    add = parser.add_argument
    add("source", metavar="SRC", help="Checkpoint: folder or Hub id.")
    add("out", metavar="DST", help="Folder to write, new or empty.")
    add("--base", metavar="MODEL", help="Model with the config and the tokenizer, if SRC has none: folder or Hub id.")

    def run(**options) -> None:
        from neobert_hf.checkpoints.conversion import convert

        print(json.dumps(convert(**options)))
        _say_next("doctor", options["out"])

    return run


def export(parser: Parser) -> Run:
    """Write a model for other runtimes: ONNX, OpenVINO, GGUF, EuroBERT.

    neobert export runs/embeddings exported
    neobert export chandar-lab/NeoBERT exported --task feature-extraction --int8
    neobert export runs/classifier exported --to onnx openvino gguf --dtype q8_0
    neobert export runs/embeddings exported --to eurobert

    Each ONNX and OpenVINO file and EuroBERT is compared with torch. The folder appears only if all agree.
    EuroBERT is the same network for transformers 5.3 and later, without code of this library.
    """
    add = parser.add_argument
    add("source", metavar="SRC", help="Model with or without a head, or embedding model: folder or Hub id.")
    add("out", metavar="OUT", help="Folder to write, new or empty.")
    add("--to", nargs="+", choices=("onnx", "openvino", "gguf", "eurobert"), default=["onnx"], help="Formats to write.")
    add("--int8", action="store_true", help="Also write ONNX and OpenVINO files in int8.")
    add("--fp16", action="store_true", help="Also write an ONNX file in float16.")
    add("--dtype", choices=("f32", "f16", "q8_0"), default="f32", help="Numbers of the GGUF file.")
    add(
        "--task",
        help="What to export: feature-extraction, fill-mask, text-classification, token-classification, sparse-encoder, "
        "question-answering, multi-vector or sentence-similarity. Default: that for which the model was saved.",
    )

    add("--json", dest="as_json", action="store_true", help="Print one JSON object.")

    def run(as_json: bool, **options) -> None:
        from neobert_hf.export import export_model
        from neobert_hf.export.exporting import agreement

        with redirect_stdout(sys.stderr):
            report = export_model(**options)
        files = [f"{name} ({agreement(entry)})" for name, entry in report["files"].items()]
        line = f"{options['out']}: {report['task']}, compared with torch: {', '.join(files)}"
        print(json.dumps(report) if as_json else line)
        served = ("question-answering", "sentence-similarity", "text-classification", "token-classification")
        if report["task"] in served and {"onnx", "openvino"} & {*options["to"]}:
            _say_next("serve", options["out"])

    return run


def predict(parser: Parser) -> Run:
    """Predict the rows of a file: classes, numbers, tags, answers, or scores of pairs.

    neobert predict runs/tickets new_tickets.csv --text_columns ticket --output predictions.csv
    neobert predict exported new_tickets.csv --text_columns ticket --dtype int8
    neobert predict runs/tagger sentences.jsonl

    The output has the columns of the file, and those of the predictions. An exported folder needs neither torch nor transformers.
    """
    add = parser.add_argument
    add("model", metavar="MODEL", help="Folder that a training saved, or that `neobert export` wrote.")
    add("file", metavar="FILE", help="Rows: .csv, .tsv, .jsonl, .json or .parquet; of words also CoNLL.")
    add("--output", "-o", metavar="FILE", help=".csv, .jsonl or .parquet. Default: predictions.csv or .jsonl, here.")
    add("--text_columns", nargs="+", default=["text"], metavar="COLUMN", help="One or two columns of text.")
    add("--word_column", help="Column of the words, for tags. Default: words or tokens. Of CoNLL a number; default: 1.")
    add("--column_names", nargs="+", metavar="NAME", help="All columns of .csv or .tsv files without a line of names.")
    add("--label_separator", help="What joins the classes of a row, if it has several. Default: a list.")
    add("--truncation", choices=("warn", "error", "off"), default="warn", help="What is done about longer texts.")
    add("--skip_bad_rows", action="store_true", help="Leave out rows with a fault, and say how many.")
    add("--overwrite", action="store_true", help="Replace the output of an earlier command.")
    add("--dtype", help="Numbers of an exported folder: fp32 (default), fp16, bf16 or int8.")
    add("--runtime", help="onnxruntime or openvino, of an exported folder. Default: the first one whose files it has.")

    def run(**options) -> None:
        from neobert_hf.export.predicting import predict_file

        predict_file(**options)

    return run


def _run(command: str, run: Run, **options) -> None:
    """Run a command without progress bars if there is no terminal; for embeddings, set the memory allocator and the threads."""
    import neobert_hf
    from neobert_cli.checks import check

    check(command, options)
    if command not in LIGHT:
        neobert_hf.register()
    gc.enable()
    if command in EMBEDDING:
        from neobert_hf.runs import limit_threads, tune_allocator

        tune_allocator()
        limit_threads()
    if not sys.stderr.isatty() and command not in LIGHT:
        from transformers.utils import logging

        logging.disable_progress_bar()
    run(**options)


def _run_script(command: str, options: dict[str, Any] | None) -> None:
    """Check the options of a script, None for the help of transformers, then import it."""
    if command not in LIGHT:
        import neobert_hf
        from neobert_cli.checks import check

        if options is not None:
            check(command, options)
            if os.environ.get("RANK", "0") == "0":
                print(f"neobert {command}: loading the libraries", flush=True)  # which takes seconds
        neobert_hf.register()
    script = import_module(f"neobert_hf.examples.{command.replace('-', '_')}")
    gc.enable()
    script.main()


def _say_next(*words: str) -> None:
    """Tell the command that may follow, on the standard error, because the standard output is JSON."""
    from neobert_hf.files.messages import say_next

    with redirect_stdout(sys.stderr):
        say_next(("neobert", *words))


COMMANDS = (embed, search, predict, train_tokenizer, tokenize, doctor, convert, export)
SCRIPTS = {  # with the first line of their help
    "example-data": "Write the small files that the documentation uses.",
    "finetune-classifier": "Train a model to give texts a class or a number.",
    "finetune-tagger": "Train a model to tag words, such as names of people.",
    "finetune-qa": "Train a model to find the answer in a text.",
    "train-contrastive": "Train an embedding model, by pairs of texts.",
    "train-reranker": "Train a model to order documents by a question.",
    "pretrain-mlm": "Pretrain a model on text, by the paper's recipe.",
    "adapt-vocabulary": "Give a model the vocabulary of a domain or language.",
    "serve": "Answer requests over HTTP by a saved or exported model.",
}
# Commands whose packages the extra `embed` installs; what the others miss is first in another extra.
LIGHT = ("example-data", "predict", "serve")  # these need torch later, or never
EMBEDDING = ("embed", "search", "train-contrastive", "train-reranker")


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of `neobert`, and those of its commands."""
    completion = 'Completion in bash and zsh: eval "$(register-python-argcomplete neobert)"'
    title = "NeoBERT in the Hugging Face ecosystem."
    parser = Parser(prog="neobert", description=title, epilog=completion)
    parser.add_argument("--version", action="version", version=f"neobert_hf {metadata.version('neobert_hf')}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command in COMMANDS:
        name, text = command.__name__.replace("_", "-"), inspect.getdoc(command) or ""
        title = text.partition("\n")[0]
        subparser = commands.add_parser(name, help=title, description=text)
        subparser.set_defaults(run=command(subparser))
    for name, title in SCRIPTS.items():  # add_table has --help
        table = _table(name)
        script = commands.add_parser(name, help=title, add_help=False, **table["parser"])
        add_table(script, table["groups"])
    return parser, commands.choices


@cache
def _tables() -> dict[str, Any]:
    return json.loads(Path(__file__).parents[1].joinpath("neobert_hf", "options.json").read_text("utf-8"))


def _table(command: str) -> dict[str, Any]:
    """The frozen arguments of a script."""
    return _tables()[f"examples/{command.replace('-', '_')}.py"]


def main() -> None:
    """Entry point of `neobert`: status 2 for a wrong command line, 1 for another error that the user can correct."""
    parser, commands = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    command, run = _chosen(parser, commands)
    neobert_cli.is_checking = True
    gc.disable()  # the objects that an import makes live to the end: a collection finds nothing, and takes a tenth of the time
    from neobert_hf.files.errors import run_command
    from neobert_hf.files.terminal import naming

    with naming([name[2:] for name in commands[command]._option_string_actions if name.startswith("--")]):
        try:
            run_command(f"neobert {command}", run, extra="embed" if command in EMBEDDING else "")
        finally:
            gc.enable()
            gc.freeze()  # what is left at the exit is not visited again, which takes seconds after an import of transformers


def _chosen(parser: Parser, commands: dict[str, Parser]) -> tuple[str, Run]:
    """The command that the command line names, and the function to call."""
    command, *words = sys.argv[1:] or [""]
    if command in SCRIPTS:
        sys.argv[:2] = [f"neobert {command}"]  # the name of the program in its help and errors
        given = None
        if "--help_all" in words:
            sys.argv[1:] = ["--help"]
        else:
            given = typed_options(commands[command], words, _table(command)["has_library"])
        return command, lambda: _run_script(command, given)
    if command not in commands:
        if command[:1] not in ("", "-"):
            parser.refuse("command", command, commands)
        parser.parse_args()
        parser.parse_args(["--help"])  # which ends, as the line before does unless there are no words
    options = commands[command].parse_intermixed_args(words)  # a question may stand behind an option
    return command, lambda: _run(command, **vars(options))


if __name__ == "__main__":
    main()
