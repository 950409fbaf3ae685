"""Summary of a finished pretraining: its figures, its curves, and the record for the model card."""

import os
from importlib.metadata import version
from pathlib import Path

import numpy as np
import yaml
from transformers import Trainer

from ..checkpoints.record import write_record
from ..files.output import write_json, writing
from ..runs import environment
from ..runs.resume import RECIPE, SUMMARY
from .flops import num_elements, training_flops

FIGURES = ("steps", "num_tokens", "num_masked", "precision", "devices")  # on the card, beside the record
SIZES = ("num_tokens", "num_masked", "sum_of_squares")  # that decide the operations
COUNTS = "pretraining"  # the sums of a run, in the state of a checkpoint
HELD_OUT_METRICS = ("eval_loss", "eval_perplexity", "eval_masked_accuracy")


def write_summary(trainer: Trainer, run: dict, held_out: dict, record: dict) -> dict:
    """Write `training_summary.json`, the curves, `recipe.yaml`, and `training.json` for the model card; return the summary."""
    machine = environment()
    folder, log = Path(trainer.args.output_dir), trainer.state.log_history
    last = [entry for entry in log if "masked_accuracy" in entry][-1]
    speeds = ("tokens_per_s", "model_flops_utilization")
    model, counts = trainer.accelerator.unwrap_model(trainer.model), trainer.state.stateful_callbacks[COUNTS]
    summary = {
        **run,
        "num_parameters": num_elements(model.parameters()),
        "training_flops": training_flops(model, *(counts[name] for name in SIZES)),
        "steps": trainer.state.global_step,
        **{name: last[name] for name in ("num_tokens", "num_masked", "loss", "perplexity", "masked_accuracy")},
        **held_out,
        **{name: float(np.median([entry[name] for entry in log if name in entry])) for name in speeds},
        "packing_efficiency": last["num_tokens"] / (trainer.state.global_step * trainer.args.tokens_per_step),
        "training_seconds": trainer.seconds,
        "devices": trainer.accelerator.num_processes,
        "precision": {"no": "fp32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision),
        "machine": {name: value for name, value in machine.items() if name != "versions"},
        "versions": machine["versions"] | {"neobert_hf": version("neobert_hf")},
    }
    with writing(folder / RECIPE) as file:
        file.write(as_yaml(record).encode())
    write_json(folder / SUMMARY, summary)
    plot_curves(log, folder / "training_curves.png")
    _write_record(trainer.args, summary, record)
    return summary


def _write_record(training, summary, record):
    source = summary["data"].get("source", summary["data"])
    dataset = source.get("dataset_name")
    names = [file["name"] for file in source.get("files", ())] or [dataset]
    count = summary["data"].get("num_documents") if len(names) == 1 else None
    machine = summary["machine"]
    values = {name: value for name, value in record.items() if name != "run"} | record["run"]
    settings = {
        **{name: _public(value) for name, value in values.items()},
        **{name: summary[name] for name in FIGURES},
        "versions": ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        "machine": machine["gpu"] or f"{machine['processor']} ({machine['instructions']})",
        "time": f"{summary['training_seconds']:.0f} s",
    }
    metrics = {name.removeprefix("eval_"): summary[name] for name in summary if name in HELD_OUT_METRICS}
    score = {"dataset": "held-out documents", "split": "validation", "metrics": metrics}
    score["trivial"] = {"masked_accuracy": summary.get("eval_trivial_masked_accuracy")}
    write_record(
        training.output_dir,
        training,
        source=training.init_from,
        rows=dict.fromkeys(names, count),
        datasets=[dataset] if dataset and not Path(dataset).is_dir() else [],
        scores=[score] if metrics else [],
        settings=settings,
    )


def _public(value):
    """A value as a public card shows it: files and folders have their names alone."""
    if isinstance(value, list):
        return ", ".join(map(str, map(_public, value)))
    return Path(value).name if isinstance(value, str) and os.path.exists(value) else value


def as_yaml(record: dict) -> str:
    """Return a record as the content of `recipe.yaml`."""
    return yaml.safe_dump(record, sort_keys=False)


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
        axes.set(title=title, xlabel="real tokens seen")
        axes.xaxis.set(major_locator=MaxNLocator(6), major_formatter=EngFormatter())
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
    figure.savefig(file, dpi=120)
