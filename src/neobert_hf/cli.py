"""`neobert COMMAND ...`: thin commands over the public functions. `neobert COMMAND --help` says what each takes."""

import json
import sys
from dataclasses import dataclass, field

from transformers import AutoTokenizer, HfArgumentParser


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
    sample_by: str = field(default="paragraph", metadata={"help": "A document in .txt: line, paragraph or document."})
    max_length: int = field(default=4096, metadata={"help": "Where documents are cut, in tokens."})
    long_documents: str = field(default="truncate", metadata={"help": "truncate, as in the paper, or chunk."})
    documents_per_shard: int = field(default=10_000, metadata={"help": "Documents of the source in a shard."})
    num_processes: int = field(default=None, metadata={"help": "Processes that tokenize; one for each core."})


@dataclass
class DocumentationArguments:
    """Write the documentation inside this Python as JSON lines, a corpus to try things on."""

    output_dir: str = field(metadata={"help": "Folder for the files and the tokenizer."})
    num_held_out: int = field(default=1000, metadata={"help": "Entries that go into held_out.jsonl."})
    held_out_packages: list[str] = field(default=None, metadata={"help": "Packages that are held out whole."})
    vocab_size: int = field(default=8192, metadata={"help": "Size of the WordPiece vocabulary trained on the rest."})
    seed: int = field(default=0, metadata={"help": "Of the order."})


def tokenize(arguments: TokenizeArguments) -> None:
    """Run `neobert tokenize`."""
    from .corpus import Corpus
    from .shards import tokenize_corpus

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
    from .documentation import write_corpus

    print(json.dumps(write_corpus(**vars(arguments))))


COMMANDS = {"tokenize": (TokenizeArguments, tokenize), "documentation": (DocumentationArguments, documentation)}


def main() -> None:
    """Entry point of `neobert`."""
    command = sys.argv[1] if len(sys.argv) > 1 else None
    if command not in COMMANDS:
        names = "\n".join(f"  {name:<14} {arguments.__doc__}" for name, (arguments, _) in COMMANDS.items())
        print(f"usage: neobert COMMAND ...\n\n{names}\n\n`neobert COMMAND --help` says what a command takes.")
        raise SystemExit(0 if command in (None, "-h", "--help") else f"neobert: there is no command {command!r}")
    arguments_class, run = COMMANDS[command]
    parser = HfArgumentParser(arguments_class, prog=f"neobert {command}")
    (arguments,) = parser.parse_args_into_dataclasses(sys.argv[2:])
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        raise SystemExit(f"neobert {command}: {error}") from error


if __name__ == "__main__":
    main()
