"""Pseudo-perplexity of files of texts: a line for each text, resumed after an interruption, with summary and figure."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from pseudo_perplexity import (
    MAX_TOKENS,
    MaskedText,
    confidence_interval,
    load_masked_model,
    masked_losses,
    median_by_length,
    positions_to_mask,
    pseudo_perplexity,
    unmasked_ids,
)
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from neobert_hf import best_dtype
from neobert_hf.checkpoints import load_tokenizer
from neobert_hf.data import check_max_length, longest_text, read_text_column
from neobert_hf.embeddings import hash_of_weights
from neobert_hf.files import write_json


@dataclass
class PseudoPerplexityArguments:
    """Texts and model."""

    files: list[str] = field(metadata={"help": "Files of rows with a column of texts."})
    output_dir: str = field(metadata={"help": "Folder of the results; rerun the command to resume."})
    model_name_or_path: str = field(metadata={"help": "Any masked language model."})
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    num_texts: int = field(default=None, metadata={"help": "Number of texts. Default: all."})
    positions: int = field(
        default=None, metadata={"help": "Number of positions per text, drawn at random. Default: all."}
    )
    include_special: bool = field(default=False, metadata={"help": "Mask the special tokens too."})
    max_seq_length: int = field(
        default=None, metadata={"help": "Length in tokens at which texts are truncated. Default: not at all."}
    )
    max_tokens: int = field(
        default=MAX_TOKENS, metadata={"help": "Largest number of tokens in a batch; it bounds the memory."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the positions."})

    def __post_init__(self):
        if self.num_texts is not None and self.num_texts < 1:
            raise ValueError(f"num_texts={self.num_texts} leaves no text; give 1 or more")


def masked_texts(
    arguments: PseudoPerplexityArguments, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, MaskedText, int]]:
    """Return the number of each text, its tokens with the positions to mask, and how many could be masked, by length."""
    cut = {} if arguments.max_seq_length is None else {"truncation": True, "max_length": arguments.max_seq_length}
    special = () if arguments.include_special else unmasked_ids(tokenizer)
    documents = []
    texts = read_text_column(arguments.files, arguments.text_column)[: arguments.num_texts]
    for number, (where, text) in enumerate(texts):
        ids = tokenizer(text, **cut)["input_ids"]
        try:
            positions = positions_to_mask(ids, special, arguments.positions, arguments.seed + number)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        documents.append((number, MaskedText(ids, positions), len(positions_to_mask(ids, special))))
    return sorted(documents, key=lambda document: len(document[1].input_ids))  # so that batches have little padding


def evaluate_files(arguments: PseudoPerplexityArguments) -> dict:
    """Compute, write a line per text, summary.json and by_length.png, and return the summary.

    The name of the file of lines has a hash of everything that decides them, so a call with other texts, weights or arguments
    has another file, and the same call computes the missing lines only.

    Raises:
        ValueError: A text has special tokens only or is longer than the positions of the model, or the model has no head of
            masked language modelling, or its tokenizer no mask token.
        OSError: A file cannot be read or written.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(arguments.model_name_or_path)
    if tokenizer.mask_token is None:
        raise ValueError(f"the tokenizer of {arguments.model_name_or_path} has no mask token; choose a masked model")
    model = load_masked_model(arguments.model_name_or_path, dtype=best_dtype(device)).to(device)
    documents = masked_texts(arguments, tokenizer)
    if longest_text(model):  # texts may be longer than those of the training, if positions are rotary
        check_max_length(model, len(documents[-1][1].input_ids))

    run = {"texts": [(text.input_ids, text.positions) for _, text, _ in documents], "dtype": str(model.dtype)}
    identity = hash_of_weights(model, {**run, "config": model.config.to_json_string(use_diff=True)})
    file = Path(arguments.output_dir, f"texts-{identity}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = finished_lines(file)
    rest = documents[len(lines) :]
    losses = masked_losses(model, tokenizer.mask_token_id, (text for _, text, _ in rest), arguments.max_tokens)
    with file.open("a", encoding="utf-8") as stream:
        for (number, text, num_tokens), values in tqdm(zip(rest, losses), "texts", len(rest), unit=" texts"):
            low, high = confidence_interval(values, num_tokens)
            line = {
                "text": number,
                "length": len(text.input_ids),
                "positions": len(values),
                "low": low,
                "high": high,
            }
            line["pseudo_perplexity"] = pseudo_perplexity(values)
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            lines.append(line)
    values = [line["pseudo_perplexity"] for line in lines]
    summary = {
        "model": arguments.model_name_or_path,
        "texts": len(lines),
        "positions": sum(line["positions"] for line in lines),
        "median": statistics.median(values),
        "by_length": median_by_length([line["length"] for line in lines], values),
    }
    write_json(Path(arguments.output_dir, "summary.json"), summary)
    plot_by_length(lines, summary["by_length"]).savefig(Path(arguments.output_dir, "by_length.png"), dpi=150)
    return summary


def finished_lines(file: Path) -> list[dict]:
    """Return the lines of an earlier call; an interrupted call may have left a part of a line at the end, which is removed."""
    if not file.is_file():
        return []
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    os.truncate(file, end)
    return list(map(json.loads, content[:end].splitlines()))


def plot_by_length(lines: list[dict], curve: list[dict]) -> Figure:
    """Return the values of all texts and their medians by length."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    values = [line["pseudo_perplexity"] for line in lines]
    axes.scatter([line["length"] for line in lines], values, s=6, alpha=0.4, label="one text")
    axes.plot([point["up_to"] for point in curve], [point["median"] for point in curve], "ko-", label="median")
    axes.set(xlabel="length, tokens", ylabel="pseudo-perplexity", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend()
    return figure
