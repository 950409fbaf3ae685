"""The command `neobert`: thin commands over the public functions of neobert_hf.

This module stands beside the package, and the commands import the package when they run: `neobert --help` and the completion of
a shell do not wait for torch and transformers.

A command is a function that declares its arguments on a parser and returns the function to run with them. Its docstring is the
help. To add a command, write this function and add it to COMMANDS.
"""

import argparse
import difflib
import inspect
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import NoReturn

Run = Callable[..., None]


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line, with a suggestion for a mistyped argument."""

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's; an unknown argument is an error of the command that it follows."""
        args = sys.argv[1:] if args is None else list(args)
        if "" in args:
            self.error("an argument is an empty string; leave it out, or give it a value")
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            self.error(f"unknown argument {unknown[0]}" + "".join(f"; did you mean {name}?" for name in close))
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """End with one line, without the usage that argparse prints before it, and status 2."""
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} --help` lists the arguments\n")


def embed(parser: Parser) -> Run:
    """Embed the texts of files.

    neobert embed texts.txt -o vectors.npy
    neobert embed reviews.csv --text_column review --normalize -o reviews.parquet
    neobert embed a.jsonl b.jsonl --model runs/embeddings -o vectors.jsonl

    A model reads the beginning of a text: the first 128 tokens in the mini model. The result counts the texts that are longer.
    The file is written at the end, so an interrupted command keeps nothing: split files whose embedding takes long.
    """
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="Texts: .txt (a text in each line), .jsonl, .csv or .parquet.")
    add("--output", "-o", required=True, metavar="FILE", help="File to write; see below.")
    add("--model", metavar="MODEL", help="Embedding model: folder or Hub id. Default: the mini model of this package.")
    add("--text_column", default="text", metavar="NAME", help="Column of the texts; .txt has no columns.")
    add("--prompt_name", metavar="NAME", help="Name of the model's prompt to put before each text.")
    add("--normalize", action="store_true", help="Scale each embedding to length 1.")
    add("--batch_size", type=int, default=64, metavar="INT", help="Number of texts in a batch of the model.")
    parser.epilog = "An output .npy holds the embeddings; .jsonl and .parquet hold the columns text and embedding."

    def run(model: str | None, **options) -> None:
        from neobert_hf import MINI_MODEL_PATH, tune_allocator
        from neobert_hf.embeddings.vector_files import embed_files

        tune_allocator()
        print(json.dumps(embed_files(model=model or MINI_MODEL_PATH, **options)))

    return run


def tokenize(parser: Parser) -> Run:
    """Tokenize text into shards for pretraining.

    neobert tokenize --files a.jsonl b.jsonl --tokenizer_name google-bert/bert-base-uncased --output_dir shards
    neobert tokenize --dataset_name wikimedia/wikipedia --dataset_config 20231101.en \\
        --tokenizer_name google-bert/bert-base-uncased --long_documents chunk --output_dir shards

    After an interruption, the same command continues.
    """
    add = parser.add_argument
    add("--output_dir", required=True, metavar="FOLDER", help="Folder of the shards.")
    add("--tokenizer_name", required=True, metavar="NAME", help="Folder or Hub id of a fast tokenizer.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--files", nargs="+", metavar="FILE", help="Text, JSON lines, CSV or Parquet, all of one kind.")
    source.add_argument("--dataset_name", metavar="NAME", help="Dataset of the Hub, instead of files.")
    add("--dataset_config", metavar="NAME", help="Configuration of the dataset.")
    add("--split", default="train", metavar="NAME", help="Split of the dataset.")
    add("--text_column", default="text", metavar="NAME", help="Column that holds the text.")
    text = "Unit of a .txt file that is one document; blank lines separate paragraphs."
    add("--sample_by", choices=("line", "paragraph", "document"), default="paragraph", help=text)
    add("--max_length", type=int, default=4096, metavar="INT", help="Maximum length of a document in tokens.")
    text = "Longer documents: truncate drops the rest, as in the paper; chunk makes further documents of it."
    add("--long_documents", choices=("truncate", "chunk"), default="truncate", help=text)
    add("--documents_per_shard", type=int, default=10_000, metavar="INT", help="Number of documents in a shard.")
    add("--num_processes", type=int, metavar="INT", help="Number of processes that tokenize. Default: one for a core.")

    def run(output_dir, tokenizer_name, files, dataset_name, dataset_config, split, text_column, sample_by, **options):
        from neobert_hf.data.corpus import Corpus
        from neobert_hf.data.origins import load_tokenizer
        from neobert_hf.data.shards import tokenize_corpus

        corpus = Corpus(files, dataset_name, dataset_config, split, text_column, sample_by)
        shards = tokenize_corpus(corpus, load_tokenizer(tokenizer_name), output_dir, corpus.source, **options)
        names = ("num_documents", "num_tokens", "num_empty", "length_histogram")
        print(json.dumps({"folder": output_dir, **{name: shards.manifest[name] for name in names}}))

    return run


def pack(parser: Parser) -> Run:
    """Plan which documents share a row, before training; training finds the plan beside the shards.

    neobert pack shards                                     (phase 1 of the paper)
    neobert pack shards --max_length 4096 --longer_than 0 1024 2048     (phase 2)
    neobert pack shards --num_held_out 0                    (training has --validation_files)

    Training makes a missing plan itself. This command makes it in advance, for example on a machine without a GPU. Every value
    must equal that of the training.
    """
    add = parser.add_argument
    add("shards_dir", metavar="SHARDS_DIR", help="Folder that `neobert tokenize` wrote.")
    add("--row_tokens", type=int, default=8192, metavar="INT", help="Token budget of a row, as in training.")
    add("--max_length", type=int, default=1024, metavar="INT", help="Length at which training truncates documents.")
    text = "Make one plan for each number: of the documents with more tokens than it. 0 takes all documents."
    add("--longer_than", type=int, nargs="+", default=[0], metavar="INT", help=text)
    text = "Number of held-out documents; 0 if training has --validation_files."
    add("--num_held_out", type=int, default=1000, metavar="INT", help=text)
    add("--seed", type=int, default=42, metavar="INT", help="Seed of the training.")

    def run(shards_dir, row_tokens, max_length, longer_than, num_held_out, seed):
        from neobert_hf.data.plans import write_packing_plan
        from neobert_hf.data.shards import Shards

        documents = Shards(shards_dir)
        if num_held_out:
            documents, _ = documents.split(num_held_out, seed)
        for length in longer_than:
            chosen = documents.longer_than(length) if length else documents
            plan = write_packing_plan(chosen, row_tokens, max_length, seed=seed)
            result = {"folder": str(plan.folder), "rows": len(plan), "documents": len(plan.documents)}
            efficiency = round(plan.num_tokens / (len(plan) * row_tokens), 4)
            print(json.dumps({**result, "tokens": plan.num_tokens, "packing_efficiency": efficiency}))

    return run


COMMANDS = (embed, tokenize, pack)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of the description, and shows the defaults that are not None or False."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def make_parser() -> Parser:
    """Return the parser of `neobert` with all commands."""
    parser = Parser(prog="neobert", description="NeoBERT in the Hugging Face ecosystem.")
    parser.add_argument("--version", action="version", version=f"neobert_hf {metadata.version('neobert_hf')}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command in COMMANDS:
        title, _, text = command.__doc__.partition("\n\n")
        description = f"{title}\n\n{inspect.cleandoc(text)}"
        options = {"help": title, "description": description, "formatter_class": _HelpFormatter}
        subparser = commands.add_parser(command.__name__, **options)
        subparser.set_defaults(run=command(subparser))
    return parser


def main() -> None:
    """Entry point of `neobert`: status 2 for a wrong command line, 1 for another error that the user can correct."""
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions: eval "$(register-python-argcomplete neobert)"
        import argcomplete

        argcomplete.autocomplete(parser)
    options = vars(parser.parse_args())
    command, run = options.pop("command"), options.pop("run", parser.print_help)
    if command is None:
        return run()
    from neobert_hf.runs.commands import run_command

    run_command(f"neobert {command}", lambda: run(**options))


if __name__ == "__main__":
    main()
