"""The figure of throughput by sequence length."""

import hashlib
import json

from matplotlib.figure import Figure

from page_tables.results import RESULTS, machine, result_of
from page_tables.speed import THROUGHPUT, lengths_of

FIGURE = RESULTS / "throughput.png"

FIGURE_LABELS = {
    "ceiling": "ours: matrix products only",
    "ours": "ours",
    "ours-prepacked": "ours, prepacked",
    "ours-int8": "ours, int8",
    "published": "published code",
    "openvino": "OpenVINO, same weights",
    "modernbert-base": "ModernBERT-base",
    "modernbert-base-int8": "ModernBERT-base, int8",
    "bert-base": "BERT-base",
    "nomic-bert": "nomic-bert",
}


def figure_hash() -> str:
    """The hash that the figure carries: of the results that it shows, and of its labels."""
    contents = [(RESULTS / f"{name}.json").read_bytes() for name in THROUGHPUT]
    return hashlib.sha256(b"".join([*contents, json.dumps(FIGURE_LABELS).encode()])).hexdigest()


def draw() -> None:
    """Draw tokens/s by sequence length into FIGURE: a panel for each kind of CPU, a line for each model."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    colors = {}
    for axes, result in zip(figure.subplots(1, len(THROUGHPUT), sharey=True), map(result_of, THROUGHPUT)):
        lengths = [length for length in lengths_of(result) if length > 16]
        for model in dict.fromkeys(row["model"] for row in result["rows"]):
            speeds = [r["tokens_per_s"] for r in result["rows"] if r["model"] == model and r["length"] in lengths]
            is_ours = model.startswith("ours")
            style = ":" if model == "ceiling" else "-" if is_ours else "--"
            color = colors.setdefault(model, f"C{len(colors)}")
            label = FIGURE_LABELS.get(model, model)
            axes.plot(lengths, speeds, style, color=color, marker="o", linewidth=2.5 if is_ours else 1.2, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, map(str, lengths))
        axes.set_xlabel("sequence length, tokens (log scale)")
        axes.set_title(f"{result['settings']['dtype']}\n{machine(result)}", fontsize="medium")
        axes.grid(which="major", alpha=0.3)
        axes.legend(fontsize="x-small")
    ticks = [100, 200, 500, 1000, 2000, 5000]
    figure.axes[0].set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    figure.axes[0].set_ylabel("tokens per second (log scale)")
    figure.savefig(FIGURE, dpi=130, metadata={"Source": figure_hash()})
