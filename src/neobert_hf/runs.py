"""A run's folder: what the run is, its checkpoints, and what is left of it at the end."""

import json
import os
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .shards import write_json

logger = logging.get_logger(__name__)

STATE = "trainer_state.json"  # what Trainer writes last
RUN = "run.json"


def last_whole_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint of a run that was written to its end, or None.

    Trainer writes `trainer_state.json` last: where it is missing or cut, the run was killed while it saved.
    """
    checkpoints = []
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.rpartition("-")[2]
        if step.isdigit():
            checkpoints.append((int(step), path))
    for step, path in sorted(checkpoints, reverse=True):
        try:
            state = json.loads((path / STATE).read_text("utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            logger.warning(f"{path} was not written to its end and is passed over")
            continue
        if state["global_step"] == step:
            return path
    return None


def begin_or_resume(folder: str | Path, run: dict, resume_from_checkpoint: str | None) -> Path | None:
    """Decide where a run begins, and keep what it is in `run.json`, so that nothing else goes on in its place.

    Args:
        folder: The run's output folder.
        run: What the run is: recipe, shape, data, tokenizer, seed; plain types.
        resume_from_checkpoint: "last" for the newest whole checkpoint, or the path of one; None begins anew.

    Returns:
        The checkpoint to go on from, or None.

    Raises:
        FileExistsError: The folder holds checkpoints and nothing was said of going on.
        FileNotFoundError: There is no whole checkpoint to go on from.
        ValueError: The checkpoint belongs to another run.
    """
    folder = Path(folder)
    last = last_whole_checkpoint(folder)
    if resume_from_checkpoint is None:
        if last is not None:
            raise FileExistsError(
                f"{folder} holds {last.name}; give --resume_from_checkpoint last to go on from it, or another --output_dir"
            )
        checkpoint = None
    else:
        wants_last = resume_from_checkpoint in ("last", "true", "True", True)
        checkpoint = last if wants_last else Path(resume_from_checkpoint)
        if checkpoint is None or not (checkpoint / STATE).is_file():
            raise FileNotFoundError(
                f"{checkpoint or folder} holds no whole checkpoint; begin without --resume_from_checkpoint"
            )
        there = json.loads((checkpoint.parent / RUN).read_text("utf-8"))
        if different := sorted(name for name in {**run, **there} if run.get(name) != there.get(name)):
            details = "; ".join(f"{name} was {there.get(name)} and is {run.get(name)}" for name in different)
            raise ValueError(f"{checkpoint} belongs to another run: {details}. Give the same, or another --output_dir")
    if checkpoint is None and int(os.environ.get("RANK", 0)) == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RUN, run)
    return checkpoint


def write_summary(trainer: Trainer, run: dict, held_out: dict) -> dict:
    """Write `training_summary.json`, for a model card to cite, and `training_curves.png`; returns the summary."""
    folder, log = Path(trainer.args.output_dir), trainer.state.log_history
    last = [entry for entry in log if "masked_accuracy" in entry][-1]
    names = ("num_tokens", "num_masked", "loss", "perplexity", "masked_accuracy")
    speeds = [entry["tokens_per_s"] for entry in log if "tokens_per_s" in entry]
    shares = [entry["model_flops_utilization"] for entry in log if "model_flops_utilization" in entry]
    summary = {
        **run,
        "num_parameters": sum(p.numel() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()),
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
    (folder / "training_summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    plot_curves(log, folder / "training_curves.png")
    return summary


def plot_curves(log: list[dict], file: Path) -> None:
    """Draw loss, masked accuracy, learning rate and gradient norm over real tokens seen."""
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
