"""Pseudo-perplexity of a file of texts: a line for each text, resumed after an interruption, with summary and figure."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.files import write_json, writing
from ..data.origins import load_tokenizer
from ..data.rows import read_text_column
from ..data.texts import longest_text
from ..embeddings.models import hash_of_weights
from ..model.machine_neobert import best_dtype
from ..runs import MINI_MODEL_PATH
from ..runs.allocator import tune_allocator
from ..runs.folders import lock_run
from ..runs.manifests import read_json_object
from .pseudo_perplexity import (
    MAX_TOKENS,
    MaskedText,
    confidence_interval,
    corpus_pseudo_perplexity,
    load_masked_model,
    masked_losses,
    median_by_length,
    one_pass_losses,
    positions_to_mask,
    pseudo_perplexity,
    unmasked_ids,
)


@dataclass
class PseudoPerplexityArguments:
    """Texts and model."""

    files: list[str] = field(metadata={"help": ".jsonl, .csv, .tsv or .parquet files with a column of texts."})
    output_dir: str = field(metadata={"help": "Folder of the results; the same command again goes on."})
    model_name_or_path: str = field(
        default=MINI_MODEL_PATH,
        metadata={"help": "Any masked language model. Default: the mini model in this package."},
    )
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    num_texts: int = field(default=None, metadata={"help": "Number of texts. Default: all."})
    positions: int = field(
        default=None, metadata={"help": "Number of positions per text, drawn at random. Default: all."}
    )
    include_special: bool = field(default=False, metadata={"help": "Mask the special tokens too."})
    one_pass: bool = field(
        default=False,
        metadata={"help": "Also compute the losses without masks, and report how well they follow the exact ones."},
    )
    max_seq_length: int = field(
        default=None, metadata={"help": "Length in tokens at which texts are truncated. Default: not at all."}
    )
    max_tokens: int = field(
        default=MAX_TOKENS, metadata={"help": "Largest number of tokens in a batch; it bounds the memory."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the positions."})


def finished(file: Path) -> list[dict]:
    """Return the complete lines of an earlier call; an interrupted call may have left a part of a line at the end."""
    if not file.is_file():
        return []
    *complete, part = file.read_text("utf-8").split("\n")
    if part:
        with writing(file) as stream:
            stream.write("".join(f"{line}\n" for line in complete).encode())
    return list(map(json.loads, complete))


def masked_texts(
    arguments: PseudoPerplexityArguments, tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[tuple[int, MaskedText, int]]:
    """Return the number of each text, its tokens with the positions to mask, and how many could be masked, by length."""
    cut = {} if arguments.max_seq_length is None else {"truncation": True, "max_length": arguments.max_seq_length}
    special = () if arguments.include_special else unmasked_ids(tokenizer)
    documents = []
    for number, (where, text) in enumerate(
        read_text_column(arguments.files, arguments.text_column)[: arguments.num_texts]
    ):
        ids = tokenizer(text, **cut)["input_ids"]
        try:
            positions = positions_to_mask(ids, special, arguments.positions, arguments.seed + number)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if len(ids) > longest:
            raise ValueError(
                f"{where}: {len(ids):,} tokens, more than {longest:,}, the budget or the positions of the model; truncate with "
                "--max_seq_length, or raise --max_tokens"
            )
        documents.append((number, MaskedText(ids, positions), len(positions_to_mask(ids, special))))
    return sorted(documents, key=lambda each: len(each[1].input_ids))  # so that texts of one batch have similar lengths


def evaluate(arguments: PseudoPerplexityArguments) -> dict:
    """Compute, write lines, summary and figure, and return the summary."""
    tune_allocator()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(arguments.model_name_or_path)
    if tokenizer.mask_token_id is None:
        raise ValueError(f"the tokenizer of {arguments.model_name_or_path} has no mask token; choose a masked model")
    model = load_masked_model(arguments.model_name_or_path, dtype=best_dtype(device)).to(device)
    documents = masked_texts(
        arguments, tokenizer, min(arguments.max_tokens, longest_text(model) or arguments.max_tokens)
    )

    run = {"texts": [(text.input_ids, text.positions) for _, text, _ in documents], "dtype": str(model.dtype)}
    run |= {"config": model.config.to_json_string(use_diff=True), "one_pass": arguments.one_pass}
    identity = {"model": arguments.model_name_or_path, "hash": hash_of_weights(model, run)}
    lines_file = Path(arguments.output_dir, "texts.jsonl")
    check_identity(Path(arguments.output_dir, "run.json"), lines_file, identity)
    lines = finished(lines_file)
    rest = documents[len(lines) :]
    losses = masked_losses(model, tokenizer.mask_token_id, (text for _, text, _ in rest), arguments.max_tokens)
    with lines_file.open("a", encoding="utf-8") as stream:
        for (number, text, num_tokens), values in tqdm(zip(rest, losses), "texts", len(rest), unit=" texts"):
            low, high = confidence_interval(values, num_tokens)
            line = {"text": number, "length": len(text.input_ids), "positions": len(values), "loss": sum(values)}
            line |= {"num_tokens": num_tokens, "pseudo_perplexity": pseudo_perplexity(values), "low": low, "high": high}
            if arguments.one_pass:
                line["one_pass"] = pseudo_perplexity(one_pass_losses(model, text))
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            lines.append(line)
    return summarize(arguments, lines)


def check_identity(file: Path, lines_file: Path, identity: dict):
    """Write the identity of the results, or raise ValueError if the folder has others, or a file that is no result.

    The hash identifies the model too: its folder may have moved, or have been spelled in another way.
    """
    if not file.is_file():
        if lines_file.exists():
            raise ValueError(
                f"{lines_file} is in the way: without {file.name} it is no result of this command; choose another --output_dir"
            )
        write_json(file, identity)
    elif read_json_object(file).get("hash") != identity["hash"]:
        raise ValueError(
            f"{file.parent} has results of other texts, arguments or weights, or of another command; choose another --output_dir"
        )


def summarize(arguments: PseudoPerplexityArguments, lines: list[dict]) -> dict:
    """Write summary.json and by_length.png, and return the summary."""
    lengths, values = ([line[name] for line in lines] for name in ("length", "pseudo_perplexity"))
    curve = median_by_length(lengths, values)
    summary = {
        "model": arguments.model_name_or_path,
        "texts": len(lines),
        "positions": sum(line["positions"] for line in lines),
        "median": statistics.median(values),
        "of_all_tokens": corpus_pseudo_perplexity(
            [line["loss"] / line["positions"] for line in lines], [line["num_tokens"] for line in lines]
        ),
        "by_length": curve,
    }
    if arguments.one_pass:
        approximate = [line["one_pass"] for line in lines]
        summary["one_pass"] = {
            "median": statistics.median(approximate),
            "spearman_with_exact": float(spearmanr(approximate, values).statistic),
        }
    write_json(Path(arguments.output_dir, "summary.json"), summary)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.scatter(lengths, values, s=6, alpha=0.4, label="one text")
    axes.plot([point["up_to"] for point in curve], [point["median"] for point in curve], "ko-", label="median")
    axes.set(xlabel="length, tokens", ylabel="pseudo-perplexity", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend()
    figure.savefig(Path(arguments.output_dir, "by_length.png"), dpi=150)
    return summary


def evaluate_alone(arguments: PseudoPerplexityArguments) -> dict:
    """Evaluate, and lock the folder against other processes."""
    with lock_run(arguments.output_dir):
        return evaluate(arguments)
