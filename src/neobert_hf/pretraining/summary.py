"""Summary of a finished pretraining: its figures, its curves, and the record for the model card."""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Trainer

from ..files.writing import write_json
from ..runs import write_record
from ..runs.folders import SUMMARY
from ..runs.manifests import CHECKPOINTS_INTACT
from .flops import num_elements

SCHEDULES = {"paper": "cosine", "code": "cosine", "constant": "constant at a tenth of the peak"}  # on the card
HELD_OUT_METRICS = ("eval_loss", "eval_perplexity", "eval_masked_accuracy")


def write_summary(trainer: Trainer, run: dict, held_out: dict) -> dict:
    """Write `training_summary.json`, `training_curves.png`, and `training.json` for the model card; return the summary."""
    folder, log = Path(trainer.args.output_dir), trainer.state.log_history
    last = [entry for entry in log if "masked_accuracy" in entry][-1]
    names = ("num_tokens", "num_masked", "loss", "perplexity", "masked_accuracy")
    speeds = [entry["tokens_per_s"] for entry in log if "tokens_per_s" in entry]
    shares = [entry["model_flops_utilization"] for entry in log if "model_flops_utilization" in entry]
    summary = {
        **run,
        "num_parameters": num_elements(trainer.accelerator.unwrap_model(trainer.model).parameters()),
        "steps": trainer.state.global_step,
        **{name: last[name] for name in names},
        **held_out,
        "tokens_per_s": float(np.median(speeds)),
        "model_flops_utilization": float(np.median(shares)),
        "packing_efficiency": last["num_tokens"] / (trainer.state.global_step * trainer.args.tokens_per_step),
        "devices": trainer.accelerator.num_processes,
        "precision": {"no": "fp32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    write_json(folder / SUMMARY, summary, CHECKPOINTS_INTACT)
    plot_curves(log, folder / "training_curves.png")
    _write_record(trainer.args, summary)
    return summary


def _write_record(training, summary):
    source, recipe = summary["data"].get("source", summary["data"]), summary["recipe"]
    dataset = source.get("dataset_name")
    names = [file["name"] for file in source.get("files", ())] or [dataset]
    count = summary["data"].get("num_documents") if len(names) == 1 else None
    metrics = {name.removeprefix("eval_"): summary[name] for name in summary if name in HELD_OUT_METRICS}
    of_recipe = ("weight_decay", "warmup_steps", "tokens_per_step", "max_length", "mlm_probability")
    write_record(
        training.output_dir,
        training,
        source=training.init_from,
        rows=dict.fromkeys(names, count),
        datasets=[dataset] if dataset and not Path(dataset).is_dir() else [],
        scores=[{"dataset": "held-out documents", "split": "validation", "metrics": metrics}] if metrics else [],
        settings={
            "recipe": f"{Path(training.recipe).stem}, phase {training.phase}",
            "optimizer": summary["optim"],
            "peak_learning_rate": recipe["learning_rate"],
            "schedule": SCHEDULES.get(recipe["schedule"], recipe["schedule"]),
            "steps": summary["steps"],
            "tokens": summary["num_tokens"],
            "predicted_tokens": summary["num_masked"],
            **{name: recipe[name] for name in of_recipe},
            "precision": summary["precision"],
            "seed": training.seed,
        },
    )


def plot_curves(log: list[dict], file: Path) -> None:
    """Plot loss, masked accuracy, learning rate and gradient norm against the number of real tokens seen."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    panels = {
        "loss per masked token": ("loss", "eval_loss"),
        "masked accuracy": ("masked_accuracy", "eval_masked_accuracy"),
        "learning rate": ("learning_rate",),
        "gradient norm": ("grad_norm",),
    }
    tokens_at = {entry["step"]: entry["num_tokens"] for entry in log if "num_tokens" in entry}
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, panels.items()):
        for name in names:
            points = [(tokens_at[e["step"]], e[name]) for e in log if name in e and e["step"] in tokens_at]
            if points:
                label = "held out" if name.startswith("eval") else "training"
                axes.plot(*zip(*points), label=label, marker="." if len(points) < 20 else None)
        axes.set_title(title)
        axes.set_xlabel("real tokens seen")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
    figure.savefig(file, dpi=120)
