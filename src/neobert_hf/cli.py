"""`neobert COMMAND ...`: thin commands over the public functions. `neobert COMMAND --help` lists the arguments of each.

typer parses the command line. Modules that take long to import are imported inside the commands, so that `--help` and shell
completion do not wait for them.
"""

import io
import json
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import typer
from typer.core import TyperCommand

from . import MINI_MODEL_PATH, __version__
from .data import wordpiece
from .data.files import write_error, writing
from .data.rows import read_text_column
from .runs.commands import one_line, run_command

MOST_TOGETHER = 65_536  # texts in a batch, results of a query, ...: a larger number is a typing error
NEGATIVE = re.compile(r"-\d+(\.\d+)?")
OUTPUTS = (".npy", ".jsonl", ".parquet")
UsageError = typer.BadParameter.__base__  # click's class, or that of the copy of click inside newer versions of typer


class Command(TyperCommand):
    """A command whose list options take several values, which refuses empty strings and ends errors with one line."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parse `--files a b` as `--files a --files b`, then refuse empty strings."""
        many = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        try:
            rest = super().parse_args(ctx, list(_repeated(args, many)))
        except UsageError as error:
            error.ctx = error.ctx or ctx  # the parser of options does not know the command
            param = getattr(error, "param", None)
            if getattr(param, "multiple", False) and (param.metavar or "").startswith("INT"):
                _check_numbers(ctx, param, args)
            raise
        for param in self.params:
            value = ctx.params.get(param.name)
            if any(isinstance(each, str) and not each.strip() for each in _as_list(value)):
                raise typer.BadParameter("an empty string; leave the argument out, or give a value", ctx, param)
        return rest

    def invoke(self, ctx: typer.Context) -> None:
        """Run the command; an error that the user can correct ends the process with one line, and status 1."""
        run_command(ctx.command_path, super().invoke, ctx)


def _as_list(value: object) -> list | tuple:
    return value if isinstance(value, (list, tuple)) else [value]


def _repeated(args: list[str], many: set[str]) -> Iterator[str]:
    """The command line with the name of an option before each of its values, for options that take several.

    Negative numbers, and the argument after the option unless it begins with two dashes, are values; `--` ends the list.
    """
    option, has_value = None, False
    for place, argument in enumerate(args):
        if argument == "--":
            yield from args[place:]
            return
        is_first = option is not None and not has_value and not argument.startswith("--")
        if argument.startswith("-") and not is_first and not NEGATIVE.fullmatch(argument):
            option = argument if _underscored(argument) in many else None
            has_value = False
        elif option:
            if has_value:
                yield option
            has_value = True
        yield argument


def _underscored(option: str) -> str:
    return option.replace("-", "_").replace("__", "--", 1)


def _check_numbers(ctx: typer.Context, param: typer.CallbackParam, args: list[str]) -> None:
    """Raise an error that names the value of a list of numbers that is none, perhaps an argument after the list."""
    repeated = list(_repeated(args, set(param.opts)))
    for option, value in pairwise(repeated):
        if _underscored(option) in param.opts and not re.fullmatch(r"[+-]?\d+", value):
            raise typer.BadParameter(
                f"{value!r} is not a whole number; put arguments without a name before the options, or after --",
                ctx,
                param,
            )


app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("-", "_"),  # --output-dir is --output_dir
    },
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"neobert_hf {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """NeoBERT in the Hugging Face ecosystem: search documentation, embed texts, prepare a corpus for pretraining.

    \b
    neobert search "read a file line by line"
    neobert embed texts.txt -o vectors.npy
    neobert COMMAND --help
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


Model = Annotated[
    str,
    typer.Option("--model", show_default="the small model of this package", help="Embedding model: folder or Hub id."),
]
BatchSize = Annotated[
    int, typer.Option("--batch_size", min=1, max=MOST_TOGETHER, help="Number of texts in a batch of the model.")
]


@app.command(
    cls=Command,
    epilog="""Examples:

    \b
    neobert search "read a file line by line"
    neobert search "sqlite3 connect timeout" --hybrid --top_k 5     (for questions that name what you search)
    neobert search --package torch,numpy     (type one question after another; an empty line ends)
    """,
)
def search(
    questions: Annotated[
        list[str] | None, typer.Argument(metavar="QUESTION", help="Questions; without any, type them.")
    ] = None,
    package: Annotated[
        str,
        typer.Option(
            help="Packages and modules to search in, separated by commas: torch.nn,json. `python` is the standard library, "
            "`all` is every installed package."
        ),
    ] = "python",
    model: Model = MINI_MODEL_PATH,
    top_k: Annotated[
        int, typer.Option("--top_k", min=1, max=MOST_TOGETHER, help="Number of results for each question.")
    ] = 3,
    num_candidates: Annotated[
        int,
        typer.Option(
            "--num_candidates",
            min=0,
            max=MOST_TOGETHER,
            help="Number of nearest entries to rerank by comparing their tokens with those of the question; 0 disables "
            "reranking. Reranking keeps the vectors of all tokens in the cache.",
        ),
    ] = 0,
    hybrid: Annotated[
        bool,
        typer.Option(
            "--hybrid", help="Fuse the ranking by meaning with one by words (BM25); needs the extra `hybrid`."
        ),
    ] = False,
    batch_size: BatchSize = 64,
) -> None:
    """Search the documentation of this Python by meaning.

    An answer has name and parameters, the first sentence, the import, and a score. "0.78 cosine" is the similarity of question
    and entry: higher is better, and 1 is the most. In the standard library, "mentioned in 57 modules" are the modules whose
    code has the parts of the name; each doubling of 1 + modules adds 0.01 to what sorts the answers. With --num_candidates,
    "0.78 token cosine" is the similarity of each token of the question with the most similar token of the entry, on average.
    With --hybrid, "rank 1 by meaning, 4 by words" are the places of the entry among all entries; the sum of 1 / (60 + rank)
    sorts the answers.

    The first search in a package embeds its entries; later ones read them from the cache. Private names are left out, unless
    --package names them.
    """
    from .demo.search import DocumentationIndex

    for stream in (sys.stdin, sys.stdout):  # a character outside the terminal's encoding must not end the answers
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    packages = None if package == "all" else [name.strip() for name in package.split(",")]
    index = DocumentationIndex(embedding_model(model), packages, num_candidates, batch_size, hybrid=hybrid)
    print(f"{len(index.entries):,} entries")
    for question in questions or iter(_ask, ""):
        print(question if questions else "")
        width = shutil.get_terminal_size().columns - len("  ")
        for hit in index.search(question, top_k):
            print(textwrap.indent(hit.describe(width), "  "), flush=True)


def _ask() -> str:
    """A line that the user types; "" at the end of the input."""
    try:
        return input("question: ").strip()
    except EOFError:
        return ""


@app.command(
    cls=Command,
    epilog="""Examples:

    \b
    neobert embed texts.txt -o vectors.npy
    neobert embed reviews.csv --text_column review --normalize -o reviews.parquet
    neobert embed a.jsonl b.jsonl --model runs/embeddings -o vectors.jsonl
    """,
)
def embed(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Texts: .txt (a text in each line), .jsonl, .json, .csv, .tsv or .parquet; all but the last may be compressed.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="File to write: .npy holds the embeddings; .jsonl and .parquet hold the columns text and embedding.",
        ),
    ],
    model: Model = MINI_MODEL_PATH,
    text_column: Annotated[
        str, typer.Option("--text_column", help="Column that holds the text; .txt has no columns.")
    ] = "text",
    prompt_name: Annotated[
        str | None, typer.Option("--prompt_name", help="Name of the model's prompt to put before each text.")
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale each embedding to length 1.")] = False,
    batch_size: BatchSize = 64,
) -> None:
    """Embed the texts of files.

    A model reads the beginning of a text: the first 128 tokens in the mini model. The result counts the texts that are longer.
    The file is written at the end, so an interrupted command keeps nothing: split files whose embedding takes long.
    """
    from .embeddings.memory import batch_bytes, check_memory
    from .embeddings.models import longest_input, num_truncated

    file = Path(output)
    if file.suffix not in OUTPUTS:
        raise typer.BadParameter(f"{output} ends in none of {', '.join(OUTPUTS)}", param_hint="'--output'")
    if not file.parent.is_dir():
        raise ValueError(f"--output {output}: the folder {file.parent} does not exist; create it")
    if file.is_dir():
        raise ValueError(f"--output {output} is a folder; name a file")
    if file.exists() and any(file.samefile(each) for each in files if Path(each).exists()):
        raise ValueError(f"--output {output} is also an input, whose other columns would be lost; name another file")
    _check_writable(file)
    text_bytes = sum(Path(each).stat().st_size for each in files if Path(each).is_file())
    check_memory(text_bytes, f"reading {', '.join(files)}", "split the file")
    texts = [text for _, text in read_text_column(files, text_column)]
    encoder = embedding_model(model)
    vector_bytes = 2 * 4 * len(texts) * (encoder.get_embedding_dimension() or 0)  # separate vectors, then one array
    check_memory(
        vector_bytes + batch_bytes(encoder, batch_size),
        f"embedding {len(texts):,} texts, {batch_size} at once",
        "choose a smaller --batch_size, or split the file",
    )
    try:
        vectors = encoder.encode(
            texts,
            batch_size=batch_size,
            prompt_name=prompt_name,
            normalize_embeddings=normalize,
            show_progress_bar=True,
        )
    except KeyboardInterrupt:
        print(f"\ninterrupted: {output} is not written, and no embedding is kept", file=sys.stderr)
        raise
    with writing(file) as handle:
        _WRITERS[file.suffix](handle, texts, vectors)
    prompt = encoder.prompts.get(prompt_name or encoder.default_prompt_name, "")
    result = {"output": output, "texts": len(texts), "dimension": int(vectors.shape[1])}
    result |= {"max_seq_length": longest_input(encoder), "truncated": num_truncated(encoder, texts, prompt)}
    print(json.dumps(result))


def _check_writable(output: Path) -> None:
    """Find out before the work that the file cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=output.parent) as handle:
            handle.write(b"0" * 4096)
    except OSError as error:
        raise write_error(error, output, "no text was embedded") from error


def _write_npy(handle: BinaryIO, texts: list[str], vectors) -> None:
    """As np.save, which does not report that a disk is full."""
    import numpy as np

    np.lib.format.write_array_header_1_0(handle, np.lib.format.header_data_from_array_1_0(vectors))
    handle.write(np.ascontiguousarray(vectors).data)


def _write_jsonl(handle: BinaryIO, texts: list[str], vectors) -> None:
    rows = ({"text": text, "embedding": vector.tolist()} for text, vector in zip(texts, vectors))
    handle.writelines(f"{json.dumps(row)}\n".encode() for row in rows)


def _write_parquet(handle: BinaryIO, texts: list[str], vectors) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    embeddings = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "embedding": embeddings}), handle)


_WRITERS = {".npy": _write_npy, ".jsonl": _write_jsonl, ".parquet": _write_parquet}


def embedding_model(name: str):
    """Open a model of sentence-transformers in the dtype of its config; bf16 weights in the dtype that is fastest here."""
    import torch
    from sentence_transformers.util import get_device_name

    from . import best_dtype, tune_allocator
    from .embeddings.models import open_embedding_model

    tune_allocator()
    if name == MINI_MODEL_PATH:  # stored in bf16, although its config declares float32
        return open_embedding_model(name, model_kwargs={"dtype": best_dtype(get_device_name())})
    try:
        model = open_embedding_model(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {name} cannot be opened ({one_line(error)}); give an existing folder or a Hub id"
        ) from error
    return model.to(best_dtype(model.device)) if model.dtype == torch.bfloat16 else model


@app.command(
    cls=Command,
    epilog="""Examples:

    \b
    neobert tokenize --files a.jsonl b.jsonl --tokenizer_name google-bert/bert-base-uncased --output_dir documents
    neobert tokenize --dataset_name wikimedia/wikipedia --dataset_config 20231101.en \\
        --tokenizer_name google-bert/bert-base-uncased --output_dir documents \\
        --executor slurm --executor_options partition=cpu time=10:00:00
    """,
)
def tokenize(
    output_dir: Annotated[
        str,
        typer.Option(
            "--output_dir", help="Folder of the token ids; the same command again resumes after an interruption."
        ),
    ],
    tokenizer_name: Annotated[str, typer.Option("--tokenizer_name", help="Folder or Hub id of a fast tokenizer.")],
    files: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE...", help="Text, JSON lines, CSV, TSV or Parquet files, compressed or not."),
    ] = None,
    dataset_name: Annotated[
        str | None, typer.Option("--dataset_name", help="Dataset of the Hub, instead of files.")
    ] = None,
    dataset_config: Annotated[
        str | None, typer.Option("--dataset_config", help="Configuration of the dataset.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    text_column: Annotated[str, typer.Option("--text_column", help="Column that holds the text.")] = "text",
    sample_by: Annotated[
        Literal["line", "paragraph", "document"],
        typer.Option("--sample_by", help="Unit of a .txt file that is one document; blank lines separate paragraphs."),
    ] = "paragraph",
    executor: Annotated[
        Literal["local", "slurm", "ray"], typer.Option(help="What runs the tasks: an executor of datatrove.")
    ] = "local",
    tasks: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="one for each file, 8 to 1,000",
            help="Parts of the corpus that are tokenized one by one; an interrupted part begins again.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="number of cores; with Slurm and Ray, all tasks",
            help="Tasks that run at the same time.",
        ),
    ] = None,
    executor_options: Annotated[
        list[str] | None,
        typer.Option(
            "--executor_options",
            metavar="NAME=VALUE...",
            help="Further arguments of datatrove's executor; Slurm requires partition and time.",
        ),
    ] = None,
) -> None:
    """Tokenize text for pretraining. Documents are stored whole; training cuts long ones."""
    from .data.corpus import Corpus
    from .data.origins import load_tokenizer
    from .data.tokenizing import tokenize, typed_options

    if bool(files) == bool(dataset_name):
        raise typer.BadParameter("give exactly one of them", param_hint="'--files' / '--dataset_name'")
    corpus = Corpus(files or None, dataset_name, dataset_config, split, text_column, sample_by)
    options = typed_options(executor_options or ())
    documents = tokenize(corpus, load_tokenizer(tokenizer_name), output_dir, executor, tasks, workers, options)
    names = ("num_documents", "num_tokens", "length_histogram")
    written = {name: documents.manifest[name] for name in names} if documents else {"submitted": executor}
    print(json.dumps({"folder": output_dir, **written}))


@app.command(
    cls=Command,
    epilog="""Examples:

    \b
    neobert documentation --output_dir runs/documentation
    neobert documentation --output_dir runs/documentation --held_out_packages pandas networkx --vocab_size 6400
    neobert documentation --output_dir runs/documentation --question_files hub_upload/mini_questions.tsv
    """,
)
def documentation(
    output_dir: Annotated[
        str, typer.Option("--output_dir", help="Folder for train.jsonl, held_out.jsonl, pairs and the tokenizer.")
    ],
    num_held_out: Annotated[
        int,
        typer.Option("--num_held_out", min=0, max=10_000_000, help="Number of entries written to held_out.jsonl."),
    ] = 1000,
    held_out_packages: Annotated[
        list[str] | None,
        typer.Option(
            "--held_out_packages",
            metavar="PACKAGE...",
            help="Packages whose entries are all held out, into a file of their own.",
        ),
    ] = None,
    vocab_size: Annotated[
        int,
        typer.Option(
            "--vocab_size",
            min=wordpiece.LEAST_TOKENS,
            max=wordpiece.MOST_TOKENS,
            help="Size of the WordPiece vocabulary, trained on train.jsonl and train_english.jsonl.",
        ),
    ] = 8192,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the shuffle.")] = 0,
    more_packages: Annotated[
        bool,
        typer.Option(
            "--more_packages",
            help="Download 30 well-known packages with pip, about 180 MB, and add their documentation and WordNet.",
        ),
    ] = False,
    question_files: Annotated[
        list[str] | None,
        typer.Option(
            "--question_files",
            metavar="FILE...",
            help="Tables with columns name, of an entry, and question; written as pairs to train_questions.jsonl.",
        ),
    ] = None,
) -> None:
    """Write the documentation of this Python as a corpus."""
    from .demo.corpus import write_corpus

    held_out = held_out_packages or None
    written = write_corpus(output_dir, num_held_out, held_out, vocab_size, seed, more_packages, question_files or ())
    print(json.dumps(written))


command = typer.main.get_command(app)


def main() -> None:
    """Entry point of `neobert`: exit status 2 and one line for a wrong command line."""
    try:
        status = command.main(prog_name="neobert", standalone_mode=False)
    except UsageError as error:
        prog = error.ctx.command_path if error.ctx else "neobert"
        message = one_line(error.format_message()).rstrip(".")
        print(f"{prog}: error: {message}; `{prog} --help` lists the arguments", file=sys.stderr)
        raise SystemExit(2) from error
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
