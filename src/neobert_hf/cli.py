"""`neobert COMMAND ...`: thin commands over the public functions. `neobert COMMAND --help` says what each takes."""

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from transformers import AutoTokenizer
from transformers.hf_argparser import HfArg

from . import MINI_MODEL_PATH
from .commands import Bounds, CommandParser, run_command, some_text
from .data import wordpiece
from .data.files import write_error, writing
from .data.shards import MOST_DOCUMENTS, MOST_TOKENS, most_processes, tokenize_corpus

MOST_TOGETHER = 65_536  # texts in a batch, answers to a question, ...: more is a slip


@dataclass
class TokenizeArguments:
    """Tokenize text once, into shards that training maps into memory."""

    output_dir: str = field(
        metadata={"help": "Folder of the shards; run the same again to go on after an interruption."}
    )
    tokenizer_name: str = field(metadata={"help": "Folder or Hub id of a fast tokenizer."})
    files: list[str] = field(default=None, metadata={"help": "Text, JSON lines or Parquet files."})
    dataset_name: str = field(default=None, metadata={"help": "Dataset of the Hub, in place of files."})
    dataset_config: str = field(default=None, metadata={"help": "Its configuration."})
    split: str = field(default="train", metadata={"help": "Its split."})
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    sample_by: Literal["line", "paragraph", "document"] = field(
        default="paragraph", metadata={"help": "What is a document in a .txt file."}
    )
    max_length: Annotated[int, Bounds(1, MOST_TOKENS)] = field(
        default=4096,
        metadata={"help": "Where documents are cut, in tokens; more than the tokenizer's special ones."},
    )
    long_documents: Literal["truncate", "chunk"] = field(
        default="truncate", metadata={"help": "What becomes of the rest: dropped, as in the paper, or more documents."}
    )
    documents_per_shard: Annotated[int, Bounds(1, MOST_DOCUMENTS)] = field(
        default=10_000, metadata={"help": "Documents of the source in a shard."}
    )
    num_processes: Annotated[int, Bounds(1, most_processes())] = field(
        default=None, metadata={"help": "Processes that tokenize; one for each core."}
    )


@dataclass
class DocumentationArguments:
    """Write the documentation inside this Python as JSON lines, a corpus to try things on."""

    output_dir: str = field(metadata={"help": "Folder for the files and the tokenizer."})
    num_held_out: Annotated[int, Bounds(0, 10_000_000)] = field(
        default=1000, metadata={"help": "Entries that go into held_out.jsonl."}
    )
    held_out_packages: list[str] = field(default=None, metadata={"help": "Packages that are held out whole."})
    vocab_size: Annotated[int, Bounds(wordpiece.LEAST_TOKENS, wordpiece.MOST_TOKENS)] = field(
        default=8192, metadata={"help": "Size of the WordPiece vocabulary trained on the rest."}
    )
    seed: Annotated[int, Bounds(0, 2**32 - 1)] = field(default=0, metadata={"help": "Of the order."})


@dataclass
class SearchArguments:
    """Search the documentation of this Python by meaning: neobert search "read a file line by line" [--package torch]."""

    package: str = field(
        default="python",
        metadata={
            "help": "Packages and modules to search in, with commas: torch.nn,json. python is the standard library, all is "
            "everything."
        },
    )
    model: str = field(default=MINI_MODEL_PATH, metadata={"help": "Embedding model: a folder or an id of the Hub."})
    top_k: Annotated[int, Bounds(1, MOST_TOGETHER)] = field(default=3, metadata={"help": "Answers to show."})
    num_candidates: Annotated[int, Bounds(0, MOST_TOGETHER)] = field(
        default=None,
        metadata={
            "help": "So many nearest entries are compared token by token; 200 with the small model, none with others. The "
            "vectors of all tokens are kept then."
        },
    )
    batch_size: Annotated[int, Bounds(1, MOST_TOGETHER)] = field(
        default=64, metadata={"help": "Texts that are embedded at once."}
    )


@dataclass
class EmbedArguments:
    """Embed the texts of a file: neobert embed texts.txt -o vectors.npy."""

    output: str = HfArg(aliases=["-o"], help="File to write: .npy, or .jsonl with text and embedding.")
    model: str = field(default=MINI_MODEL_PATH, metadata={"help": "Embedding model: a folder or an id of the Hub."})
    text_column: str = field(default="text", metadata={"help": "Column of the text; .txt has a text in each line."})
    prompt_name: str = field(default=None, metadata={"help": "Prompt of the model to put before each text."})
    normalize: bool = field(default=False, metadata={"help": "Scale each embedding to length 1."})
    batch_size: Annotated[int, Bounds(1, MOST_TOGETHER)] = field(
        default=64, metadata={"help": "Texts that are embedded at once."}
    )


def tokenize(arguments: TokenizeArguments) -> None:
    """Run `neobert tokenize`."""
    from .data.corpus import Corpus

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_name)
    corpus = Corpus(
        arguments.files,
        arguments.dataset_name,
        arguments.dataset_config,
        arguments.split,
        arguments.text_column,
        arguments.sample_by,
    )
    names = ("max_length", "long_documents", "documents_per_shard", "num_processes")
    options = {name: getattr(arguments, name) for name in names}
    shards = tokenize_corpus(corpus, tokenizer, arguments.output_dir, corpus.source, **options)
    names = ("num_documents", "num_tokens", "num_empty", "length_histogram")
    print(json.dumps({"folder": arguments.output_dir, **{name: shards.manifest[name] for name in names}}))


def documentation(arguments: DocumentationArguments) -> None:
    """Run `neobert documentation`."""
    from .demo.documentation import write_corpus

    print(json.dumps(write_corpus(**vars(arguments))))


def search(arguments: SearchArguments, questions: list[str]) -> None:
    """Run `neobert search`: answer the questions, or whatever is typed if there are none."""
    from .demo.search import DocumentationIndex

    packages = None if arguments.package == "all" else arguments.package.split(",")
    num_candidates = arguments.num_candidates
    if num_candidates is None:
        num_candidates = 200 if arguments.model == MINI_MODEL_PATH else 0
    index = DocumentationIndex(embedding_model(arguments.model), packages, num_candidates, arguments.batch_size)
    print(f"{len(index.entries):,} entries")
    for question in questions or iter(_ask, ""):
        print(question if questions else "", *index.search(question, arguments.top_k), sep="\n  ", flush=True)


def _ask() -> str:
    """A line that the user types; "" at the end of the input."""
    try:
        return input("question: ").strip()
    except EOFError:
        return ""


def embed(arguments: EmbedArguments, files: list[str]) -> None:
    """Run `neobert embed`."""
    import numpy as np

    from .data.corpus import Corpus
    from .embeddings.memory import batch_bytes, check_memory

    output = Path(arguments.output)
    if output.suffix not in (".npy", ".jsonl"):
        raise ValueError(f"--output {output} ends in neither .npy nor .jsonl")
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}")
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; name a file")
    if not files:
        raise ValueError("name a file of texts: neobert embed texts.txt -o vectors.npy")
    _check_writable(output)
    text_bytes = sum(Path(file).stat().st_size for file in files if Path(file).is_file())
    check_memory(text_bytes, f"reading {', '.join(files)}", "split the file")
    texts = list(Corpus(files, text_column=arguments.text_column, sample_by="line", is_strict=True))
    model = embedding_model(arguments.model)
    vector_bytes = 2 * 4 * len(texts) * (model.get_embedding_dimension() or 0)  # one by one, then in one array
    check_memory(
        vector_bytes + batch_bytes(model, arguments.batch_size),
        f"embedding {len(texts):,} texts, {arguments.batch_size} at once",
        "take a smaller --batch_size, or split the file",
    )
    vectors = model.encode(
        texts,
        batch_size=arguments.batch_size,
        prompt_name=arguments.prompt_name,
        normalize_embeddings=arguments.normalize,
        show_progress_bar=True,
    )
    with writing(output) as handle:
        if output.suffix == ".npy":
            np.lib.format.write_array_header_1_0(handle, np.lib.format.header_data_from_array_1_0(vectors))
            handle.write(np.ascontiguousarray(vectors).data)  # np.save does not say that a disk is full
        else:
            rows = ({"text": text, "embedding": vector.tolist()} for text, vector in zip(texts, vectors))
            handle.writelines(f"{json.dumps(row)}\n".encode() for row in rows)
    print(json.dumps({"output": str(output), "texts": len(texts), "dimension": int(vectors.shape[1])}))


def _check_writable(output: Path) -> None:
    """Learn before the work, not after it, that the file cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=output.parent) as handle:
            handle.write(b"0" * 4096)
    except OSError as error:
        raise write_error(error, output, "nothing was begun") from error


def embedding_model(name: str):
    """Open a model of sentence-transformers in the dtype of its weights; bf16 weights in the dtype that is fastest here."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import get_device_name

    from . import best_dtype, tune_allocator

    tune_allocator()
    if name == MINI_MODEL_PATH:  # known to be bf16: no need for sentence-transformers' warning of it
        return SentenceTransformer(name, model_kwargs={"dtype": best_dtype(get_device_name())})
    model = SentenceTransformer(name)
    return model.to(best_dtype(model.device)) if model.dtype == torch.bfloat16 else model


COMMANDS = {
    "search": (SearchArguments, search),
    "embed": (EmbedArguments, embed),
    "tokenize": (TokenizeArguments, tokenize),
    "documentation": (DocumentationArguments, documentation),
}
POSITIONAL = {"search": "question", "embed": "file"}


def main() -> None:
    """Entry point of `neobert`."""
    command = sys.argv[1] if len(sys.argv) > 1 else None
    if command not in COMMANDS:
        names = "\n".join(f"  {name:<14} {arguments.__doc__}" for name, (arguments, _) in COMMANDS.items())
        print(f"usage: neobert COMMAND ...\n\n{names}\n\n`neobert COMMAND --help` says what a command takes.")
        if command in (None, "-h", "--help"):
            raise SystemExit(0)
        print(f"neobert: there is no command {command!r}", file=sys.stderr)
        raise SystemExit(2)
    arguments_class, run = COMMANDS[command]
    parser = CommandParser(arguments_class, prog=f"neobert {command}", description=arguments_class.__doc__)
    if command in POSITIONAL:
        parser.add_argument(POSITIONAL[command], nargs="*", type=some_text)
    arguments, *rest = parser.parse_args_into_dataclasses(sys.argv[2:])
    run_command(parser.prog, run, arguments, *(vars(each)[POSITIONAL[command]] for each in rest))


if __name__ == "__main__":
    main()
