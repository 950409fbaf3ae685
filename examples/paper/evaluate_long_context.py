"""Compare scalings of RoPE beyond the length of the training, by pseudo-perplexity at several lengths.

    python examples/paper/evaluate_long_context.py --files long.jsonl --model_name_or_path src/neobert_hf/mini \\
        --trained_length 128 --lengths 128 256 512 1024 --output_dir runs/long-context

All lengths have the same texts, truncated: the texts that reach the longest length. The scalings are none, linear
(arXiv 2306.15595), dynamic NTK and YaRN (arXiv 2309.00071). long_context.json has the values, long_context.png the curves.
A scaling is an argument of from_pretrained: `rope_parameters={"rope_type": "yarn", "factor": 4.0}`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from long_context import SCALINGS, compare_scalings, long_context_table, plot_long_context

from neobert_hf import tune_allocator
from neobert_hf.data import read_text_column
from neobert_hf.files import run_command
from neobert_hf.runs import CommandParser, lock_run


@dataclass
class LongContextArguments:
    """Texts, model and lengths."""

    files: list[str] = field(metadata={"help": "Files of rows with a column of long texts."})
    output_dir: str = field(metadata={"help": "Folder of the results."})
    model_name_or_path: str = field(metadata={"help": "A NeoBERT with the head of masked language modelling."})
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    num_texts: int = field(default=50, metadata={"help": "Number of texts of the longest length."})
    trained_length: int = field(
        default=None, metadata={"help": "Length of the training in tokens. Default: that of the model's config."}
    )
    lengths: list[int] = field(
        default=None, metadata={"help": "Lengths in tokens. Default: 1, 2, 4 and 8 times the trained length."}
    )
    scalings: list[str] = field(
        default_factory=lambda: list(SCALINGS), metadata={"help": f"Any of {', '.join(SCALINGS)}."}
    )
    positions: int = field(default=32, metadata={"help": "Number of positions per text and length, drawn at random."})
    seed: int = field(default=0, metadata={"help": "Seed of the positions."})

    def __post_init__(self):
        if unknown := [name for name in self.scalings if name not in SCALINGS]:
            raise ValueError(f"scalings: {', '.join(unknown)} is not one of {', '.join(SCALINGS)}")


def evaluate(arguments: LongContextArguments):
    """Compute, print the table, and write values and figure."""
    with lock_run(arguments.output_dir):
        tune_allocator()
        texts = [text for _, text in read_text_column(arguments.files, arguments.text_column)]
        result = compare_scalings(
            arguments.model_name_or_path,
            texts,
            arguments.lengths,
            arguments.trained_length,
            arguments.scalings,
            arguments.num_texts,
            arguments.positions,
            arguments.seed,
        )
        folder = Path(arguments.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "long_context.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        plot_long_context(result).savefig(folder / "long_context.png", dpi=150)
        print(long_context_table(result))


def main():
    """Read the command line, and evaluate."""
    parser = CommandParser(LongContextArguments, description=__doc__)
    run_command(parser.prog, evaluate, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
