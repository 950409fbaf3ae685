"""A run's folder: what the run is, its lock, its checkpoints, and what is left of it at the end."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import distributed
from transformers import Trainer
from transformers.utils import logging

from ..data.files import only_writer, write_json
from ..deprecations import renamed_names
from .manifests import MANIFEST, STATE, STILL_GOOD, UNFINISHED, check_checkpoint, numbered_checkpoints, read_json_object

logger = logging.get_logger(__name__)

RUN = "run.json"
LOCK = "_lock"  # Trainer uploads no file whose name begins with an underscore


@contextmanager
def lock_run(folder: str | Path) -> Iterator[None]:
    """Keep other trainings out of a run's folder, which is made if it is not there.

    The system releases the lock when the process ends, however it ends; the empty file that stays locks nothing.

    Raises:
        ValueError: Another training runs in the folder.
        OSError: It cannot be written to.
    """
    with ExitStack() as held:
        _as_first_process(held.enter_context, only_writer(Path(folder), LOCK))
        yield


def _as_first_process(function: Callable, *args) -> Any:
    """Call a function in the first process; all of them get what it returns, or raise what it raises."""
    if not distributed.is_available() or not distributed.is_initialized():
        return function(*args)
    answer = [None, None]
    if distributed.get_rank() == 0:
        try:
            answer[0] = function(*args)
        except Exception as error:
            answer[1] = error
    distributed.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def last_complete_checkpoint(folder: str | Path, exactly: bool = True) -> Path | None:
    """The newest checkpoint of a run that is whole by its manifest, or None; a newer one is passed over with a warning.

    Args:
        folder: The run's output folder.
        exactly: Also pass over what cannot be resumed exactly.
    """
    checkpoint, faults = _find_whole(folder, exactly)
    _warn_of(faults)
    return checkpoint


def _warn_of(faults):
    for fault in faults:
        logger.warning(f"{fault}; this checkpoint is passed over")


def _find_whole(folder, exactly):
    """The newest complete checkpoint or None, and what is wrong with the newer ones."""
    faults = []
    for _, path in numbered_checkpoints(folder):
        try:
            check_checkpoint(path, exactly)
        except ValueError as error:
            faults.append(str(error))
        else:
            return path, faults
    return None, faults


def begin_or_resume(
    folder: str | Path, run: dict, resume_from_checkpoint: str | None, exactly: bool = True
) -> Path | None:
    """Decide where a run begins, and keep what it is in `run.json`, so that no other run continues in its place.

    With several processes the first one decides for all of them.

    Args:
        folder: The run's output folder.
        run: What the run is: recipe, shape, data, tokenizer, seed; plain types.
        resume_from_checkpoint: "last" for the newest complete checkpoint, or the path of one; None begins anew.
        exactly: Refuse a checkpoint that cannot be resumed exactly. Otherwise a warning says what is not exact; a damaged file
            is refused all the same.

    Returns:
        The checkpoint to resume from, or None.

    Raises:
        FileExistsError: The folder holds checkpoints of this or another run, and the run does not resume from one of them.
        FileNotFoundError: There is no complete checkpoint to resume from.
        ValueError: The checkpoint belongs to another run, is damaged, or cannot be resumed exactly.
    """
    return _as_first_process(_begin_or_resume, Path(folder), run, resume_from_checkpoint, exactly)


def _begin_or_resume(folder, run, resume_from_checkpoint, exactly):
    written = [path for _, path in numbered_checkpoints(folder) if _is_kept(path)]
    checkpoint = None
    if resume_from_checkpoint in ("last", "true", "True", True):
        checkpoint, faults = _find_whole(folder, exactly)
        if checkpoint is None:
            way_out = "give another --output_dir" if written else "begin without --resume_from_checkpoint"
            raise FileNotFoundError("; ".join([f"{folder} holds no complete checkpoint", *faults, way_out]))
        _warn_of(faults)
    elif resume_from_checkpoint is not None:
        checkpoint = Path(resume_from_checkpoint)
        check_checkpoint(checkpoint, exactly)
    if written and (checkpoint is None or checkpoint.parent.resolve() != folder.resolve()):
        raise FileExistsError(_way_out_of(folder, written))
    if checkpoint is not None:
        _check_run(checkpoint, run, exactly)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN, run)
    return checkpoint


def _is_kept(checkpoint):
    """Whether no new run may overwrite it: it has a manifest, or, as those of earlier versions, the Trainer's state.

    Any other was cut off while it was saved, between Trainer's state and the manifest perhaps.
    """
    if (checkpoint / MANIFEST).is_file() or (checkpoint / UNFINISHED).is_file():
        return (checkpoint / MANIFEST).is_file()
    try:
        read_json_object(checkpoint / STATE)
    except ValueError:
        return False
    return True


def _way_out_of(folder, written):
    """What to do about a folder that holds checkpoints, the newest first, from which the run does not resume."""
    if any((path / MANIFEST).is_file() for path in written):
        return f"{folder} holds {written[0].name}; give --resume_from_checkpoint last to resume from it, or another --output_dir"
    return (
        f"{folder} holds {written[0].name}, which has no {MANIFEST}: an earlier version wrote it, or it was cut off while it was "
        f"saved; give another --output_dir, or --resume_inexactly --resume_from_checkpoint {written[0]} to resume from it"
    )


def _check_run(checkpoint, run, exactly):
    """Raise ValueError if the checkpoint belongs to another run."""
    try:
        there = read_json_object(checkpoint.parent / RUN)
    except ValueError as error:
        if exactly:
            raise ValueError(
                f"{error}; it says which run {checkpoint.name} belongs to, and --resume_inexactly resumes without it"
            ) from error
        logger.warning(f"{error}; whether {checkpoint.name} belongs to this run was not checked")
        return
    recipe = there.get("recipe")
    if isinstance(recipe, dict) and "layout" in recipe:  # its name up to version 0.1
        there["recipe"] = {{"layout": "batch_format"}.get(name, name): value for name, value in recipe.items()}
    if different := sorted(name for name in {**run, **there} if run.get(name) != there.get(name)):
        details = "; ".join(f"{name} was {there.get(name)} and is {run.get(name)}" for name in different)
        raise ValueError(f"{checkpoint} belongs to another run: {details}. Give the same, or another --output_dir")


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
    write_json(folder / "training_summary.json", summary, STILL_GOOD)
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


__getattr__ = renamed_names(__name__, {"last_whole_checkpoint": ("last_complete_checkpoint", last_complete_checkpoint)})
