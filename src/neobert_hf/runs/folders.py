"""The output folder of a run: lock, run identity (`run.json`), resume from checkpoints, summary and curves."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import distributed
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..data.files import only_writer, write_json
from .arguments import numbered_checkpoints
from .manifests import MANIFEST, STATE, STILL_GOOD, UNFINISHED, check_checkpoint, read_json_object

logger = logging.get_logger(__name__)

RUN = "run.json"
SUMMARY = "training_summary.json"
# files that a training must not replace
REPLACED = ("model.safetensors", "model.safetensors.index.json", "README.md", SUMMARY)
LOCK = "_lock"  # Trainer does not upload files whose name begins with an underscore


@contextmanager
def lock_run(folder: str | Path) -> Iterator[None]:
    """Lock a run's folder against other trainings; create the folder if it does not exist.

    The operating system releases the lock when the process ends, also after a crash. The empty lock file remains; it locks
    nothing.

    Raises:
        ValueError: Another training runs in the folder.
        OSError: The folder cannot be written.
    """
    with ExitStack() as held:
        _as_first_process(held.enter_context, only_writer(Path(folder), LOCK))
        yield


def _as_first_process(function: Callable, *args) -> Any:
    """Call a function in the first process only; every process returns its result or raises its error."""
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
    """Return the newest checkpoint of a run whose files match its manifest, or None.

    A warning names each newer checkpoint that is skipped.

    Args:
        folder: Output folder of the run.
        exactly: Also skip checkpoints that cannot be resumed exactly.
    """
    checkpoint, faults = _find_complete(folder, exactly)
    _warn_of(faults)
    return checkpoint


def _warn_of(faults):
    for fault in faults:
        logger.warning(f"{fault}; skipped this checkpoint")


def _find_complete(folder, exactly):
    """Return the newest complete checkpoint or None, and the faults of the newer checkpoints."""
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
    """Return the checkpoint to resume from, and write the identity of the run to `run.json`.

    The identity prevents that another run continues from this run's checkpoints. With several processes, the first process
    decides for all.

    Args:
        folder: Output folder of the run.
        run: Identity of the run as plain types: recipe, shape, data, tokenizer, seed.
        resume_from_checkpoint: "last" for the newest complete checkpoint, "auto" for the same if there is a checkpoint at all,
            or the path of a checkpoint; None starts a new run.
        exactly: Refuse a checkpoint that cannot be resumed exactly. Otherwise a warning says what is not exact; a damaged file
            is refused in both cases.

    Returns:
        The checkpoint to resume from, or None.

    Raises:
        FileExistsError: The folder holds checkpoints, and the run does not resume from one of them; or it holds another model.
        FileNotFoundError: No checkpoint is complete.
        ValueError: The checkpoint belongs to another run, is damaged, or cannot be resumed exactly.
    """
    return _as_first_process(_begin_or_resume, Path(folder), run, resume_from_checkpoint, exactly)


def _begin_or_resume(folder, run, resume_from_checkpoint, exactly):
    written = [path for _, path in numbered_checkpoints(folder) if _is_kept(path)]
    checkpoint = None
    if resume_from_checkpoint == "auto":
        resume_from_checkpoint = "last" if written else None
    if resume_from_checkpoint in ("last", "true", "True", True):
        checkpoint, faults = _find_complete(folder, exactly)
        if checkpoint is None:
            way_out = "give another --output_dir" if written else "start without --resume_from_checkpoint"
            raise FileNotFoundError("; ".join([f"{folder} holds no complete checkpoint", *faults, way_out]))
        _warn_of(faults)
    elif resume_from_checkpoint is not None:
        checkpoint = Path(resume_from_checkpoint)
        check_checkpoint(checkpoint, exactly)
    if written and (checkpoint is None or checkpoint.parent.resolve() != folder.resolve()):
        raise FileExistsError(_way_out_of(folder, written))
    if checkpoint is None and (held := [name for name in REPLACED if Path(folder, name).exists()]):
        raise FileExistsError(
            f"{folder} holds {held[0]}, which the trained model would replace; give another --output_dir, or remove the file"
        )
    if checkpoint is not None:
        _check_run(checkpoint, run, exactly)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN, run)
    return checkpoint


def _run_file(init_from):
    """The file that describes the run of a model or of one of its checkpoints, or None."""
    folder = Path(init_from)
    folders = [folder, folder.parent] if folder.name.startswith(PREFIX_CHECKPOINT_DIR) else [folder]
    return next((each / name for each in folders for name in (RUN, SUMMARY) if (each / name).is_file()), None)


def check_start(
    model: PreTrainedModel, init_from: str | Path, architecture: str, num_tokens: int, tokenizer_sha256: str
):
    """Check that phase 2 continues the model of phase 1 with the same tokenizer.

    Args:
        model: The model of phase 1.
        init_from: Its folder, or the folder of one of its checkpoints, or an id on the Hub.
        architecture: Model type of the recipe of phase 2.
        num_tokens: Size of the vocabulary of the tokenizer of phase 2.
        tokenizer_sha256: Hash of this tokenizer.

    Raises:
        ValueError: The recipe is of another architecture, or the tokenizer is another one.
    """
    if model.config.model_type != architecture:
        raise ValueError(
            f"{init_from} has the architecture {model.config.model_type}, and the recipe {architecture}; give the --recipe of "
            "phase 1"
        )
    file = _run_file(init_from)
    there = read_json_object(file).get("tokenizer_sha256") if file else None
    if num_tokens > model.config.vocab_size or there not in (None, tokenizer_sha256):
        raise ValueError(
            f"the tokenizer is not that of {init_from}, which has {model.config.vocab_size} tokens (this one {num_tokens}); give "
            "the --tokenizer_name of phase 1"
        )


def check_held_out(init_from: str | Path, run: dict) -> None:
    """Check that phase 1 did not train on the documents of the training text that phase 2 holds out.

    Args:
        init_from: Folder of the model of phase 1, or of one of its checkpoints; a warning says that it describes no run.
        run: Identity of the run of phase 2.

    Raises:
        ValueError: Phase 1 may have trained on documents that are held out here.
    """
    folder, file = Path(init_from), _run_file(init_from)
    if file is None:
        logger.warning(
            f"{folder} holds no {RUN}: its training may have used the documents that are held out here; give "
            "--validation_files to evaluate on other text"
        )
        return
    there, reasons = read_json_object(file), []
    held_out = there.get("held_out") if isinstance(there.get("held_out"), dict) else {}
    if _is_streamed(there):
        reasons.append("it had --streaming, which holds out no document")
    elif held_out.get("files"):
        reasons.append("it had --validation_files")
    elif not isinstance(number := held_out.get("num_held_out"), int) or number < run["held_out"]["num_held_out"]:
        reasons.append(f"num_held_out was {number} and is {run['held_out']['num_held_out']}")
    else:
        packing = there.get("packing", 1)
        if packing != run["packing"]:
            reasons.append(f"its packing version was {packing} and is {run['packing']}")
        if there.get("seed") != run["seed"]:
            reasons.append(f"seed was {there.get('seed')} and is {run['seed']}")
        if there.get("data") != run["data"]:
            reasons.append("its training text was another")
    if reasons:
        raise ValueError(
            f"phase 1 in {folder} may have trained on the documents that are held out here: {'; '.join(reasons)}. Give "
            "--validation_files, or the values of phase 1"
        )


def _is_streamed(run):
    """Whether a run had --streaming: its text was not counted before."""
    return isinstance(run.get("data"), dict) and "num_documents" not in run["data"]


def _is_kept(checkpoint):
    """Whether a new run must not overwrite the checkpoint: it has a manifest, or an earlier version wrote it without one.

    A checkpoint without a manifest and without a readable Trainer state was interrupted while it was saved. `UNFINISHED` marks
    an interruption between Trainer's state and the manifest.
    """
    if (checkpoint / MANIFEST).is_file() or (checkpoint / UNFINISHED).is_file():
        return (checkpoint / MANIFEST).is_file()
    try:
        read_json_object(checkpoint / STATE)
    except ValueError:
        return False
    return True


def _way_out_of(folder, written):
    """Error message for a folder that holds checkpoints (newest first) when no resume from them was requested."""
    if any((path / MANIFEST).is_file() for path in written):
        return (
            f"{folder} holds {written[0].name} and no resume from this folder was requested; give "
            "--resume_from_checkpoint last to resume from it, or another --output_dir"
        )
    return (
        f"{folder} holds {written[0].name}, which has no {MANIFEST}: an earlier version wrote it, or its save was interrupted; "
        f"give another --output_dir, or --resume_inexactly --resume_from_checkpoint {written[0]} to resume from it"
    )


def _check_run(checkpoint, run, exactly):
    """Raise ValueError if the checkpoint belongs to another run."""
    try:
        there = read_json_object(checkpoint.parent / RUN)
    except ValueError as error:
        if exactly:
            raise ValueError(
                f"{error}; it identifies the run of {checkpoint.name}; give --resume_inexactly to resume without this check"
            ) from error
        logger.warning(f"{error}; resuming without a check that {checkpoint.name} belongs to this run")
        return
    recipe = there.get("recipe")
    if isinstance(recipe, dict) and "layout" in recipe:  # the name of batch_format up to version 0.1
        there["recipe"] = {{"layout": "batch_format"}.get(name, name): value for name, value in recipe.items()}
    if "data" in run and "data" in there and _is_streamed(run) != _is_streamed(there):
        was, way_out = ("with", "give --streaming") if _is_streamed(there) else ("without", "leave --streaming out")
        raise ValueError(
            f"{checkpoint} belongs to a run {was} --streaming, which has another order of rows; {way_out}, or give another "
            "--output_dir and begin without --resume_from_checkpoint"
        )
    here, packing = run.get("packing"), there.get("packing", 1 if "packing" in run else None)
    if here is not None and packing is not None and here != packing:
        raise ValueError(
            f"{checkpoint} belongs to a run whose rows have another order (packing version {packing}; this version of neobert_hf "
            f"has {here}): resumed here, it would train on some documents twice and on others not at all. Resume with the "
            "version that wrote it, or give another --output_dir and begin without --resume_from_checkpoint"
        )
    if different := sorted(name for name in {**run, **there} if run.get(name) != there.get(name)):
        details = "; ".join(f"{name} was {there.get(name)} and is {run.get(name)}" for name in different)
        raise ValueError(
            f"{checkpoint} belongs to another run: {details}; give the same values, or another --output_dir"
        )


def write_summary(trainer: Trainer, run: dict, held_out: dict) -> dict:
    """Write `training_summary.json` (the figures for a model card) and `training_curves.png`; return the summary."""
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
    write_json(folder / SUMMARY, summary, STILL_GOOD)
    plot_curves(log, folder / "training_curves.png")
    return summary


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
