"""Compare scalings of RoPE beyond the length of the training, by pseudo-perplexity at several lengths.

    python examples/evaluate_long_context.py --files long.jsonl --trained_length 128 --lengths 128 256 512 1024 \\
        --output_dir runs/long-context

All lengths have the same texts: those that reach the longest length, truncated to each. The scalings are none, linear
(arXiv 2306.15595), dynamic NTK and YaRN (arXiv 2309.00071). long_context.json has the values, long_context.png the curves.
A scaling is an argument of from_pretrained: `rope_parameters={"rope_type": "yarn", "factor": 4.0}`.
"""

import itertools
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure

from neobert_hf import MINI_MODEL_PATH, NeoBERTConfig, NeoBERTForMaskedLM, best_dtype, tune_allocator
from neobert_hf.data.files import write_json
from neobert_hf.data.origins import load_tokenizer
from neobert_hf.data.rows import read_text_column
from neobert_hf.evaluation.pseudo_perplexity import (
    MAX_TOKENS,
    MaskedText,
    confidence_interval,
    load_masked_model,
    masked_losses,
    positions_to_mask,
    pseudo_perplexity,
    unmasked_ids,
)
from neobert_hf.evaluation.report import long_context_table
from neobert_hf.runs.commands import CommandParser, run_command

SCALINGS = ("none", "linear", "dynamic", "yarn")


@dataclass
class LongContextArguments:
    """Texts, model and lengths."""

    files: list[str] = field(metadata={"help": ".jsonl, .csv, .tsv or .parquet files with a column of long texts."})
    output_dir: str = field(metadata={"help": "Folder of the results."})
    model_name_or_path: str = field(
        default=str(MINI_MODEL_PATH), metadata={"help": "A NeoBERT. Default: the mini model in this package."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    num_texts: int = field(default=50, metadata={"help": "Number of texts of the longest length."})
    trained_length: int = field(
        default=None,
        metadata={"help": "Length of the training in tokens. Default: max_position_embeddings of the model."},
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
        if short := [length for length in self.lengths or () if length < 3]:
            raise ValueError(f"lengths: {short[0]} has no room for a text between two special tokens; give at least 3")


def rope_parameters(scaling: str, length: int, trained_length: int) -> dict:
    """Return the RoPE parameters for texts of at most `length` tokens.

    Dynamic NTK computes its factor from the length of each text, so its own factor is 1.
    """
    factor = max(1.0, length / trained_length)
    return {
        "none": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": factor},
        "dynamic": {"rope_type": "dynamic", "factor": 1.0},
        "yarn": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained_length},
    }[scaling]


@contextmanager
def without_warnings():
    """The model warns of lengths beyond its training, which are the purpose here."""
    logger = logging.getLogger("neobert_hf")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@without_warnings()
def evaluate(arguments: LongContextArguments):
    """Compute, print the table, and write values and figure."""
    tune_allocator()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(arguments.model_name_or_path)
    config = NeoBERTConfig.from_pretrained(arguments.model_name_or_path)
    trained_length = arguments.trained_length or config.max_position_embeddings
    lengths = sorted(arguments.lengths or [trained_length * factor for factor in (1, 2, 4, 8)])
    texts = [text for _, text in read_text_column(arguments.files, arguments.text_column)]
    texts = list(itertools.islice(long_texts(tokenizer, texts, lengths[-1]), arguments.num_texts))
    if not texts:
        raise ValueError(f"no text has {lengths[-1]} tokens; give longer texts, or shorter --lengths")

    special, documents, points = unmasked_ids(tokenizer), {}, []
    for length in lengths:
        documents[length] = [
            MaskedText(ids, positions_to_mask(ids, special, arguments.positions, arguments.seed + i))
            for i, ids in enumerate(tokenizer(texts, truncation=True, max_length=length)["input_ids"])
        ]
    for scaling in arguments.scalings:
        rope = rope_parameters(scaling, lengths[-1], trained_length)
        options = {"rope_parameters": rope, "max_position_embeddings": trained_length, "dtype": best_dtype(device)}
        model = load_masked_model(arguments.model_name_or_path, NeoBERTForMaskedLM, **options).to(device)
        for length in lengths:
            found = masked_losses(model, tokenizer.mask_token_id, documents[length], max(MAX_TOKENS, length))
            losses = [loss for each in found for loss in each]
            low, high = confidence_interval(losses, len(texts) * (length - 2))
            value = pseudo_perplexity(losses)
            points.append({"scaling": scaling, "length": length, "pseudo_perplexity": value, "low": low, "high": high})
    result = {
        "model": arguments.model_name_or_path,
        "trained_length": trained_length,
        "texts": len(texts),
        "positions": arguments.positions,
        "points": points,
    }
    Path(arguments.output_dir).mkdir(parents=True, exist_ok=True)
    write_json(Path(arguments.output_dir, "long_context.json"), result)
    plot(result).savefig(Path(arguments.output_dir, "long_context.png"), dpi=150)
    print(long_context_table(result))


def long_texts(tokenizer, texts, length):
    """Yield the texts with at least `length` tokens."""
    for text in texts:
        if len(tokenizer(text, truncation=True, max_length=length)["input_ids"]) == length:
            yield text


def plot(result: dict) -> Figure:
    """Return the curves with their 95 % intervals."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for scaling, group in itertools.groupby(result["points"], lambda point: point["scaling"]):
        lengths, values, low, high = zip(
            *([point[name] for name in ("length", "pseudo_perplexity", "low", "high")] for point in group)
        )
        axes.plot(lengths, values, "o-", label=scaling)
        axes.fill_between(lengths, low, high, alpha=0.15)
    axes.axvline(result["trained_length"], color="grey", linestyle=":", label="trained length")
    axes.set(xlabel="length, tokens", ylabel="pseudo-perplexity", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend()
    return figure


def main():
    """Read the command line, and evaluate."""
    parser = CommandParser(LongContextArguments, description=__doc__)
    run_command(parser.prog, evaluate, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
