"""The output folder of a run: lock, run identity (`run.json`), and resume from checkpoints."""

import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from ..files.json_files import read_json_object
from ..files.messages import differences, first_of, say
from ..files.output import RECORD, check_folder, only_writer, write_json
from .allocator import tune_allocator
from .arguments import ResumeArguments
from .manifests import MANIFEST, STATE, UNFINISHED, check_checkpoint, numbered_checkpoints, step_of
from .signals import SaveOnTerminate

logger = logging.get_logger(__name__)

RUN = "run.json"
SUMMARY = "training_summary.json"
RECIPE = "recipe.yaml"  # of a pretraining: what repeats it
LOCK = "_lock"  # Trainer does not upload files whose name begins with an underscore
METRICS = "metrics.jsonl"
# Arguments that determine the loss curve; a resumed run must have the same values.
CURVE = (
    *("max_steps", "num_train_epochs", "learning_rate", "learning_rate_mapping", "lr_scheduler_type"),
    *("lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "optim_args", "weight_decay", "max_grad_norm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "batch_sampler", "bf16", "fp16", "seed"),
)


def curve_of(training: TrainingArguments) -> dict[str, Any]:
    """Return the training arguments that determine the loss curve, as plain types for the identity of a run."""
    return {name: value for name, value in training.to_dict().items() if name in CURVE}


def take_folder(folder: Path, *own: str) -> AbstractContextManager[None]:
    """Lock a folder against other runs, if it is new, empty, or that of a run before.

    Args:
        folder: Output folder of the run.
        own: As of `lock_run`.

    Raises:
        FileExistsError: The folder holds what no run has written.
    """
    check_folder(folder, RUN, LOCK, *own)
    return only_writer(folder, LOCK)


@contextmanager
def lock_run(folder: str | Path, *own: str) -> Iterator[None]:
    """Lock a run's folder against other trainings; create the folder if it does not exist.

    A folder that somebody else has filled is refused, so that a run may replace all that it finds under the names that it writes.

    The lock ends with the process, also after a crash. The empty lock file remains; it locks nothing. A new folder is removed
    if an error ends the run before it has written anything but its identity.

    Args:
        folder: Output folder of the run: new, empty, or that of a run before.
        own: Further names of files by which the run knows its folder.

    Raises:
        FileExistsError: The folder holds what no run has written.
        ValueError: Another training runs in the folder.
        OSError: The folder cannot be written.
    """
    is_new = not Path(folder).exists()
    with ExitStack() as held:
        _as_first_process(lambda: held.enter_context(take_folder(Path(folder), *own)))
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
        resume_from_checkpoint: "auto" or None for the newest complete checkpoint if there is one, "last" for the same with an
            error if there is none, or the path of a checkpoint.
        exactly: Refuse a checkpoint that cannot be resumed exactly. Otherwise a warning says what is not exact; a damaged file
            is refused in both cases.

    Returns:
        The checkpoint to resume from, or None.

    Raises:
        FileExistsError: The folder holds checkpoints, and the run cannot resume from one of them; or a finished training.
        FileNotFoundError: No checkpoint is complete.
        ValueError: The checkpoint belongs to another run, is damaged, or cannot be resumed exactly.
    """
    return _as_first_process(_begin_or_resume, Path(folder), run, resume_from_checkpoint, exactly)


def _begin_or_resume(folder, run, resume_from_checkpoint, exactly):
    if resume_from_checkpoint in (None, True, "auto", "last"):
        checkpoint = last_complete_checkpoint(folder, exactly)
    else:
        checkpoint = Path(resume_from_checkpoint)
        check_checkpoint(checkpoint, exactly)
    held = [path for path in numbered_checkpoints(folder) if _is_kept(path)]
    if checkpoint is not None and checkpoint.parent.resolve() == folder.resolve():
        newer = [path for path in held if step_of(path) > step_of(checkpoint)]  # which the run would write again
        held = [path for path in newer if exactly and not (path / MANIFEST).exists()]
    elif (folder / RECORD).exists() and not held:  # the last file of a training
        _check_run(folder / RECORD, run, exactly)
        remedy = "predict with it as model_name_or_path, or give another output_dir to train again"
        raise FileExistsError(f"{folder} holds this training, which is finished; {remedy}")
    if held:
        fault = f"{folder} holds {held[0].name} of a training from which this run cannot resume"
        raise FileExistsError(f"{fault}; give another output_dir, or remove it")
    if checkpoint is not None:
        _check_run(checkpoint, run, exactly)
    elif resume_from_checkpoint == "last":
        raise FileNotFoundError(f"{folder} holds no complete checkpoint; start without resume_from_checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN, run)
    return checkpoint


def _is_kept(checkpoint):
    """Whether a run must not overwrite the checkpoint: it holds more than a save that was interrupted."""
    return checkpoint.is_dir() and any(checkpoint.iterdir()) and not (checkpoint / UNFINISHED).exists()


def _check_run(checkpoint, run, exactly):
    """Raise ValueError if the checkpoint belongs to another run."""
    try:
        earlier = read_json_object(checkpoint.parent / RUN)
    except ValueError as error:
        if exactly:
            raise ValueError(f"{error}; it identifies the run; give resume_inexactly to resume without it") from error
        logger.warning(f"{error}; resuming without a check that {checkpoint.name} belongs to this run")
        return
    if different := differences(earlier, run):
        details = first_of(different, "; ")
        raise ValueError(f"{checkpoint} belongs to another run: {details}; give the same values, or another output_dir")


def train_or_resume(make_trainer: Callable[[Path | None], Trainer], training: ResumeArguments, run: dict) -> Trainer:
    """Train from the start, or from the checkpoint that the arguments name; SIGTERM and Ctrl-C save a checkpoint first.

    If the training is finished, its last checkpoint is loaded, and a line says so. On a CPU, the memory allocator of the process
    is tuned (`tune_allocator`).

    Args:
        make_trainer: Returns the trainer; called with the checkpoint to resume from, or None, when the folder is known to be free
            for this run. What takes long or writes into the folder belongs here.
        training: Training arguments.
        run: Identity of the run, as for `begin_or_resume`.

    Returns:
        The trainer after the training.

    Raises:
        FileExistsError: As of `begin_or_resume`.
        ValueError: A checkpoint is damaged or belongs to another run.
    """
    exactly = not training.resume_inexactly
    if training.device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        tune_allocator()
    checkpoint = begin_or_resume(training.output_dir, run, training.resume_from_checkpoint, exactly)
    begun_at = checkpoint and read_json_object(checkpoint / STATE)["global_step"]
    if checkpoint:
        say(f"resuming from {checkpoint.name}")
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
    if trainer.state.global_step == begun_at:
        say(f"{training.output_dir} holds this training, which is finished; give another output_dir to train again")
    return trainer
