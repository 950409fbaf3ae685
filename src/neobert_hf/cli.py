"""`neobert COMMAND ...`: thin commands over the public functions. `neobert COMMAND --help` lists the arguments of each.

typer parses the command line. Modules that take long to import are imported inside the commands, so that `--help` and shell
completion do not wait for them.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import typer
from typer.core import TyperCommand

from . import MINI_MODEL_PATH, __version__
from .data.files import write_error, writing
from .data.shard_reader import NUM_HELD_OUT
from .data.shards import MOST_DOCUMENTS, MOST_TOKENS, Shards, most_processes, tokenize_corpus
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
    """NeoBERT in the Hugging Face ecosystem: embed texts, prepare a corpus for pretraining.

    \b
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
    neobert embed texts.txt -o vectors.npy
    neobert embed reviews.csv --text_column review --normalize -o reviews.parquet
    neobert embed a.jsonl b.jsonl --model runs/embeddings -o vectors.jsonl
    """,
)
def embed(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE", help="Texts: .txt (a text in each line), .jsonl, .csv or .parquet; all of one kind."
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
    from .data.corpus import Corpus
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
    texts = list(Corpus(files, text_column=text_column, sample_by="line", is_strict=True))
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
    neobert tokenize --files a.jsonl b.jsonl --tokenizer_name google-bert/bert-base-uncased --output_dir shards
    neobert tokenize --dataset_name wikimedia/wikipedia --dataset_config 20231101.en \\
        --tokenizer_name google-bert/bert-base-uncased --long_documents chunk --output_dir shards
    """,
)
def tokenize(
    output_dir: Annotated[
        str,
        typer.Option(
            "--output_dir", help="Folder of the shards; the same command again resumes after an interruption."
        ),
    ],
    tokenizer_name: Annotated[str, typer.Option("--tokenizer_name", help="Folder or Hub id of a fast tokenizer.")],
    files: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE...", help="Text, JSON lines, CSV or Parquet files, all of one kind."),
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
    max_length: Annotated[
        int,
        typer.Option(
            "--max_length",
            min=1,
            max=MOST_TOKENS,
            help="Maximum length of a document in tokens, the special tokens included.",
        ),
    ] = 4096,
    long_documents: Annotated[
        Literal["truncate", "chunk"],
        typer.Option(
            "--long_documents",
            help="Documents above --max_length: truncate drops the rest, as in the paper; chunk makes further documents of it.",
        ),
    ] = "truncate",
    documents_per_shard: Annotated[
        int,
        typer.Option(
            "--documents_per_shard", min=1, max=MOST_DOCUMENTS, help="Number of documents of the source in a shard."
        ),
    ] = 10_000,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num_processes",
            min=1,
            max=most_processes(),
            show_default="number of cores",
            help="Number of processes that tokenize.",
        ),
    ] = None,
) -> None:
    """Tokenize text into shards for pretraining."""
    from .data.corpus import Corpus
    from .data.origins import load_tokenizer

    if bool(files) == bool(dataset_name):
        raise typer.BadParameter("give exactly one of them", param_hint="'--files' / '--dataset_name'")
    tokenizer = load_tokenizer(tokenizer_name)
    corpus = Corpus(files or None, dataset_name, dataset_config, split, text_column, sample_by)
    shards = tokenize_corpus(
        corpus,
        tokenizer,
        output_dir,
        corpus.source,
        max_length=max_length,
        long_documents=long_documents,
        documents_per_shard=documents_per_shard,
        num_processes=num_processes,
    )
    names = ("num_documents", "num_tokens", "num_empty", "length_histogram")
    print(json.dumps({"folder": output_dir, **{name: shards.manifest[name] for name in names}}))


@app.command(
    cls=Command,
    epilog="""Examples:

    \b
    neobert pack shards                                     (phase 1 of the paper)
    neobert pack shards --max_length 4096 --longer_than 0 1024 2048     (phase 2)
    neobert pack shards --num_held_out 0                    (training has --validation_files)
    """,
)
def pack(
    shards_dir: Annotated[str, typer.Argument(metavar="SHARDS_DIR", help="Folder that `neobert tokenize` wrote.")],
    row_tokens: Annotated[
        int, typer.Option("--row_tokens", min=3, max=1 << 30, help="Token budget of a row, as in training.")
    ] = 8192,
    max_length: Annotated[
        int, typer.Option("--max_length", min=3, max=1 << 20, help="Length at which training truncates documents.")
    ] = 1024,
    longer_than: Annotated[
        list[int] | None,
        typer.Option(
            "--longer_than",
            min=0,
            max=1 << 20,
            metavar="INT...",
            show_default="0",
            help="Make one plan for each number: of the documents with more tokens than it. 0 takes all documents.",
        ),
    ] = None,
    num_held_out: Annotated[
        int,
        typer.Option(
            "--num_held_out",
            min=0,
            max=10_000_000,
            help="Number of held-out documents; 0 if training has --validation_files.",
        ),
    ] = NUM_HELD_OUT,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="Seed of the training.")] = 42,
) -> None:
    """Plan which documents share a row, before training; training finds the plan beside the shards.

    Training makes a missing plan itself. This command makes it in advance, for example on a machine without a GPU. Every value
    must equal that of the training.
    """
    from .data.plans import write_packing_plan

    documents = Shards(shards_dir)
    if num_held_out:
        documents, _ = documents.split(num_held_out, seed)
    for least in longer_than or [0]:
        chosen = documents.longer_than(least) if least else documents
        plan = write_packing_plan(chosen, row_tokens, max_length, seed=seed)
        result = {
            "folder": str(plan.folder),
            "rows": len(plan),
            "documents": len(plan.documents),
            "tokens": plan.num_tokens,
        }
        print(json.dumps({**result, "packing_efficiency": round(plan.num_tokens / (len(plan) * row_tokens), 4)}))


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
