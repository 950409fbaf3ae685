"""The output folder of a run: lock, run identity (`run.json`), and resume from checkpoints."""

import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from ..checkpoints.record import CARD_IS_EDITED, CARD_WRITER, is_generated
from ..checkpoints.trust import MODEL_FILES
from ..files.json_files import read_json_object
from ..files.messages import say
from ..files.output import WRITTEN, check_target, matches, only_writer, write_json
from .allocator import tune_allocator
from .arguments import ResumeArguments
from .manifests import MANIFEST, STATE, UNFINISHED, check_checkpoint, numbered_checkpoints
from .signals import SaveOnTerminate

logger = logging.get_logger(__name__)

RUN = "run.json"
SUMMARY = "training_summary.json"
RECIPE = "recipe.yaml"  # of a pretraining: what repeats it
LOCK = "_lock"  # Trainer does not upload files whose name begins with an underscore
# What our trainings write beside them: adapters, records, scores, pictures and predictions.
RESULTS = (
    *("adapter_config.json", "adapter_model.safetensors", "base.json", "training.json", "training_args.bin"),
    *("*_results.json", "classification_report_*.txt", "confusion_matrix_*.png", "training_curves.png"),
    *("predictions.csv", "predictions.jsonl", SUMMARY, RECIPE),
)
# And what only a resume needs, and the logs.
METRICS = "metrics.jsonl"
EVENTS = "events.out.tfevents.*"  # of TensorBoard
TRAINING_FILES: tuple[str, ...] = (RUN, LOCK, WRITTEN, METRICS, "checkpoint-[0-9]*/*", "checkpoint-[0-9]*/*/*")
TRAINING_FILES += (f"runs/{EVENTS}", f"runs/*/{EVENTS}", f"runs/*/*/{EVENTS}")
# Arguments that determine the loss curve; a resumed run must have the same values.
CURVE = (
    *("max_steps", "num_train_epochs", "learning_rate", "learning_rate_mapping", "lr_scheduler_type"),
    *("lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "optim_args", "weight_decay", "max_grad_norm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "batch_sampler", "bf16", "fp16", "seed"),
)


def curve_of(training: TrainingArguments) -> dict[str, Any]:
    """Return the training arguments that determine the loss curve, as plain types for the identity of a run."""
    return {name: value for name, value in training.to_dict().items() if name in CURVE}


def files_of_model(folder: str | Path) -> list[str]:
    """Return the names of the files at the root of a folder that belong to a saved model or to its results; code comes last."""
    names = sorted(path.name for path in Path(folder).glob("*") if not path.is_dir())
    found = [name for name in names if matches(Path(name), (*MODEL_FILES, *RESULTS))]
    return sorted(found, key=lambda name: name.endswith(".py"))


@contextmanager
def lock_run(folder: str | Path) -> Iterator[None]:
    """Lock a run's folder against other trainings; create the folder if it does not exist.

    The lock ends with the process, also after a crash. The empty lock file remains; it locks nothing. A new folder is removed
    if an error ends the run before it has written anything but its identity.

    Raises:
        ValueError: Another training runs in the folder.
        OSError: The folder cannot be written.
    """
    is_new = not Path(folder).exists()
    with ExitStack() as held:
        _as_first_process(held.enter_context, only_writer(Path(folder), LOCK))
        try:
            yield
        except BaseException:
            if is_new and {file.name for file in Path(folder).glob("*")} <= {LOCK, RUN}:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _as_first_process(function: Callable, *args) -> Any:
    """Call a function in the first process only; every process returns its result or raises its error."""
    answer: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            answer[0] = function(*args)
        except Exception as error:
            answer[1] = error
    broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def last_complete_checkpoint(folder: str | Path, exactly: bool = True) -> Path | None:
    """Return the newest checkpoint of a run whose files match its manifest, or None; a warning names each that is skipped.

    Args:
        folder: Output folder of the run.
        exactly: Also skip checkpoints that cannot be resumed exactly.
    """
    for path in numbered_checkpoints(folder):
        try:
            check_checkpoint(path, exactly)
            return path
        except (ValueError, OSError) as error:
            logger.warning(f"{error}; skipped this checkpoint")
    return None


def begin_or_resume(
    folder: str | Path, run: dict, resume_from_checkpoint: str | None, exactly: bool = True
) -> Path | None:
    """Return the checkpoint to resume from, and write the identity of the run to `run.json`, which a resume compares.

    With several processes, the first process decides for all.

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
    written = [path for path in numbered_checkpoints(folder) if _is_kept(path)]
    checkpoint = None
    if resume_from_checkpoint == "auto":
        resume_from_checkpoint = "last" if written else None
    if resume_from_checkpoint == "last":
        checkpoint = last_complete_checkpoint(folder, exactly)
        if checkpoint is None:
            remedy = "give another output_dir" if written else "start without resume_from_checkpoint"
            raise FileNotFoundError(f"{folder} holds no complete checkpoint; {remedy}")
    elif resume_from_checkpoint is not None:
        checkpoint = Path(resume_from_checkpoint)
        check_checkpoint(checkpoint, exactly)
    if written and (checkpoint is None or checkpoint.parent.resolve() != folder.resolve()):
        fault = f"{folder} holds {written[0].name} and no resume from this folder was requested"
        raise FileExistsError(f"{fault}; give resume_from_checkpoint=last to resume from it, or another output_dir")
    held = files_of_model(folder)
    if not _is_of_run(folder, run):  # which was killed before its first checkpoint
        held += [name for name in (METRICS, RUN) if (folder / name).exists()]
    if checkpoint is not None and checkpoint.parent.resolve() == folder.resolve():
        card = folder / "README.md"  # if somebody has changed it since, this is said before the training
        if not is_generated(card):
            check_target(card, CARD_WRITER, way_out=CARD_IS_EDITED)
    elif held:
        fault = f"{folder} holds {held[0]}, which the trained model would replace"
        raise FileExistsError(f"{fault}; give another output_dir, or remove the file")
    if checkpoint is not None:
        _check_run(checkpoint, run, exactly)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN, run)
    return checkpoint


def _is_of_run(folder, run):
    """Whether the folder holds the identity of a run of this kind."""
    try:
        return not run.keys().isdisjoint(read_json_object(folder / RUN))
    except ValueError:
        return False


def _is_kept(checkpoint):
    """Whether a new run must not overwrite the checkpoint: it is complete, or a plain Trainer wrote it."""
    is_of_trainer = (checkpoint / STATE).is_file() and not (checkpoint / UNFINISHED).is_file()
    return (checkpoint / MANIFEST).is_file() or is_of_trainer


def _check_run(checkpoint, run, exactly):
    """Raise ValueError if the checkpoint belongs to another run."""
    try:
        earlier = read_json_object(checkpoint.parent / RUN)
    except ValueError as error:
        if exactly:
            raise ValueError(f"{error}; it identifies the run; give resume_inexactly to resume without it") from error
        logger.warning(f"{error}; resuming without a check that {checkpoint.name} belongs to this run")
        return
    if different := sorted(name for name in {**run, **earlier} if run.get(name) != earlier.get(name)):
        details = "; ".join(f"{name} was {earlier.get(name)} and is {run.get(name)}" for name in different)
        raise ValueError(f"{checkpoint} belongs to another run: {details}; give the same values, or another output_dir")


def train_or_resume(make_trainer: Callable[[Path | None], Trainer], training: ResumeArguments, run: dict) -> Trainer:
    """Train from the start, or from the checkpoint that the arguments name; SIGTERM and Ctrl-C save a checkpoint first.

    On a CPU, the memory allocator of the process is tuned (`tune_allocator`).

    Args:
        make_trainer: Returns the trainer; called with the checkpoint to resume from, or None, when the folder is known to be free
            for this run. What takes long or writes into the folder belongs here.
        training: Training arguments.
        run: Identity of the run, as for `begin_or_resume`.

    Returns:
        The trainer after the training.

    Raises:
        FileExistsError: The folder holds checkpoints of another run.
        ValueError: A checkpoint is damaged or belongs to another run.
    """
    exactly = not training.resume_inexactly
    if training.device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        tune_allocator()
    checkpoint = begin_or_resume(training.output_dir, run, training.resume_from_checkpoint, exactly)
    trainer = make_trainer(checkpoint)
    if training.bf16:
        say("bf16=True: matrix products in bf16, weights in float32")
    signals = SaveOnTerminate()
    if not training.save_only_model:  # otherwise no checkpoint can be resumed
        trainer.add_callback(signals)
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    finally:  # an error ends the training without `on_train_end`
        signals.restore_handlers()
    return trainer
