"""Pseudo-perplexity beyond the length of the training, with each scaling of RoPE."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from matplotlib.figure import Figure
from pseudo_perplexity import (
    MaskedText,
    confidence_interval,
    load_masked_model,
    masked_losses,
    positions_to_mask,
    pseudo_perplexity,
    unmasked_ids,
)
from tabulate import tabulate

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, best_dtype
from neobert_hf.checkpoints import load_tokenizer

SCALINGS = ("none", "linear", "dynamic", "yarn")  # linear: arXiv 2306.15595; YaRN: arXiv 2309.00071


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


def compare_scalings(
    model_name_or_path: str,
    texts: Iterable[str],
    lengths: Sequence[int] | None = None,
    trained_length: int | None = None,
    scalings: Sequence[str] = SCALINGS,
    num_texts: int = 50,
    positions: int = 32,
    seed: int = 0,
) -> dict:
    """Compute the pseudo-perplexity of the same texts, truncated to several lengths, with each scaling.

    Args:
        model_name_or_path: A NeoBERT with the head of masked language modelling.
        texts: Texts; a text below the longest length does not count.
        lengths: Lengths in tokens; by default 1, 2, 4 and 8 times the trained length.
        trained_length: Length of the training in tokens; by default `max_position_embeddings` of the model.
        scalings: Any of `SCALINGS`.
        num_texts: Largest number of texts.
        positions: Number of positions to mask per text and length, drawn at random.
        seed: Seed of the positions.

    Returns:
        `model`, `trained_length`, `texts`, `positions`, and `points`: `scaling`, `length`, `pseudo_perplexity` and its 95 %
        interval from `low` to `high`.

    Raises:
        ValueError: No text reaches the longest length.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(model_name_or_path)
    trained_length = trained_length or NeoBERTConfig.from_pretrained(model_name_or_path).max_position_embeddings
    lengths = sorted(lengths or [trained_length * factor for factor in (1, 2, 4, 8)])
    tokens = (tokenizer(text, truncation=True, max_length=lengths[-1])["input_ids"] for text in texts)
    long_texts = list(itertools.islice((ids for ids in tokens if len(ids) == lengths[-1]), num_texts))
    if not long_texts:
        raise ValueError(f"no text has {lengths[-1]} tokens; give longer texts, or shorter lengths")

    special, documents, points = unmasked_ids(tokenizer), {}, []
    for length in lengths:
        cut = [[*ids[: length - 1], ids[-1]] for ids in long_texts]  # with [SEP] at the end
        documents[length] = [
            MaskedText(ids, positions_to_mask(ids, special, positions, seed + i)) for i, ids in enumerate(cut)
        ]
    for scaling in scalings:
        rope = rope_parameters(scaling, lengths[-1], trained_length)
        options = {"rope_parameters": rope, "max_position_embeddings": trained_length, "dtype": best_dtype(device)}
        model = load_masked_model(model_name_or_path, NeoBERTForMaskedLM, **options).to(device)
        for length in lengths:
            found = masked_losses(model, tokenizer.mask_token_id, documents[length])
            losses = list(itertools.chain.from_iterable(found))
            low, high = confidence_interval(losses, len(long_texts) * (length - 2))
            value = pseudo_perplexity(losses)
            points.append({"scaling": scaling, "length": length, "pseudo_perplexity": value, "low": low, "high": high})
    return {
        "model": model_name_or_path,
        "trained_length": trained_length,
        "texts": len(long_texts),
        "positions": positions,
        "points": points,
    }


def long_context_table(result: dict) -> str:
    """Return a Markdown table: a row for each scaling, a column for each length."""
    rows: dict[str, dict] = {}
    for point in result["points"]:
        shown = f"{point['pseudo_perplexity']:.1f} ({point['low']:.1f} to {point['high']:.1f})"
        rows.setdefault(point["scaling"], {"scaling": point["scaling"]})[f"{point['length']:,} tokens"] = shown
    return tabulate(list(rows.values()), headers="keys", tablefmt="github")


def plot_long_context(result: dict) -> Figure:
    """Return the curves with their 95 % intervals."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for scaling, group in itertools.groupby(result["points"], lambda point: point["scaling"]):
        names = ("length", "pseudo_perplexity", "low", "high")
        lengths, values, low, high = zip(*([point[name] for name in names] for point in group))
        axes.plot(lengths, values, "o-", label=scaling)
        axes.fill_between(lengths, low, high, alpha=0.15)
    axes.axvline(result["trained_length"], color="grey", linestyle=":", label="trained length")
    axes.set(xlabel="length, tokens", ylabel="pseudo-perplexity", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend()
    return figure
