"""Checkpoint manifests: the last file of a checkpoint lists the others, so that a run resumes from a complete checkpoint only."""

import os
import shutil
from pathlib import Path

from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..files.json_files import read_json_object
from ..files.messages import first_of, say
from ..files.output import saving, write_json
from .progress import EpochLines, Progress, without_bars

logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"  # the last file of a checkpoint
UNFINISHED = f"{MANIFEST}.unfinished"  # exists from the start of a save until the manifest is written
STATE = "trainer_state.json"


def numbered_checkpoints(folder: str | Path) -> list[Path]:
    """Return every path named checkpoint-N in a folder, highest step first."""
    paths = Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((path for path in paths if step_of(path) >= 0), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint; -1 if there is none."""
    step = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(step) if step.isdecimal() else -1


class CheckedCheckpoints(Trainer):
    """Trainer whose checkpoints end with a manifest: the size of every file, and whether a resume is exact; it shows `Progress`.

    Use it as a mixin before another Trainer class. An older checkpoint is removed (`save_total_limit`) only when the new one is
    complete. The last log has no `train_loss`: Trainer's value is the mean since the last resume, not that of the run. With
    `save_only_model`, no checkpoint can be resumed exactly.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for theirs, ours in ((PrinterCallback, EpochLines), (ProgressCallback, Progress)):  # that of notebooks stays
            if self.pop_callback(theirs):
                self.add_callback(ours)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Log as Trainer does, without `train_loss`."""
        super().log({name: value for name, value in logs.items() if name != "train_loss"}, *args, **kwargs)

    # A private method of Trainer: its callback `on_save` comes after the removal of older checkpoints.
    def _save_checkpoint(self, model, trial):
        args = self.args
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        # Trainer would remove older checkpoints before this one is complete.
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            with saving(folder), without_bars():
                if args.should_save:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / UNFINISHED).touch()
                super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # each process writes its own files
            if args.should_save:
                write_manifest(folder, is_exact=not args.save_only_model, num_processes=args.world_size)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            args.save_total_limit = limit
        if args.should_save and limit:
            self._remove_older_checkpoints(folder, limit)

    def _remove_older_checkpoints(self, newest, limit):
        best = self.state.best_model_checkpoint
        kept = {newest.name, Path(best or newest).name}  # the path of a resumed run may be spelled otherwise
        others = [path for path in own_checkpoints(newest.parent) if path.name not in kept]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[max(limit - len(kept), 0) :]:
            shutil.rmtree(path, ignore_errors=True)


def own_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a folder that this library has written, also in part."""
    return [path for path in numbered_checkpoints(folder) if any(path.glob(f"{MANIFEST}*"))]


def remove_checkpoints(folder: str | Path) -> None:
    """Remove the checkpoints of a training whose model is saved, and say so."""
    found = own_checkpoints(folder)
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    if found:
        say(f"removed {first_of(path.name for path in found)}: the model is saved; save_total_limit keeps checkpoints")


def write_manifest(checkpoint: Path, is_exact: bool = True, num_processes: int = 1) -> None:
    """Write the manifest of a complete checkpoint.

    Args:
        checkpoint: Folder of the checkpoint.
        is_exact: Whether the files hold everything that an exact resume needs.
        num_processes: Number of training processes; the checkpoint holds the random state of each.
    """
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith(MANIFEST))
    files = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in paths}
    manifest = {"is_exact": is_exact, "num_processes": num_processes, "files": files}
    write_json(checkpoint / MANIFEST, manifest)
    (checkpoint / UNFINISHED).unlink(missing_ok=True)


def check_checkpoint(checkpoint: Path, exactly: bool = True) -> None:
    """Compare a checkpoint with its manifest.

    Args:
        checkpoint: Folder of the checkpoint.
        exactly: Refuse a checkpoint that cannot be resumed exactly: no manifest, no optimizer state, a missing file, or another
            number of processes. Otherwise a warning says what is not exact.

    Raises:
        ValueError: The checkpoint is damaged, incomplete, or cannot be resumed exactly; the message says why.
    """
    step = read_json_object(checkpoint / STATE).get("global_step")
    inexact = [f"{checkpoint} has no {MANIFEST}: its save was interrupted, or another program wrote it"]
    if (checkpoint / MANIFEST).exists():
        manifest = read_json_object(checkpoint / MANIFEST)
        if not manifest.keys() >= {"files", "is_exact", "num_processes"}:
            raise ValueError(f"{checkpoint / MANIFEST} is damaged: it lacks files, is_exact or num_processes")
        inexact = _compare(checkpoint, manifest)
    if step_of(checkpoint) not in (-1, step):  # a copy under another name
        raise ValueError(f"{checkpoint} holds the state of step {step}")
    if exactly and inexact:
        raise ValueError(f"{'; '.join(inexact)}; give resume_inexactly to resume from it")
    for reason in inexact:
        logger.warning(f"{reason}; the resumed run will differ from an uninterrupted run")


def _compare(checkpoint, manifest):
    """Raise ValueError for a damaged file; return the reasons why an exact resume is impossible."""
    missing = [name for name in manifest["files"] if not (checkpoint / name).is_file()]
    for name in manifest["files"].keys() - missing:
        size, written = (checkpoint / name).stat().st_size, manifest["files"][name]
        if size != written:
            raise ValueError(f"{checkpoint / name} is damaged: {size} bytes, but {written} were written")
    inexact = [f"{checkpoint} lacks {first_of(missing)}"] if missing else []
    if not manifest["is_exact"]:
        inexact.append(f"{checkpoint} was saved without optimizer state (save_only_model)")
    written_by, num_processes = manifest["num_processes"], int(os.environ.get("WORLD_SIZE", 1))  # of every launcher
    if num_processes != written_by:
        inexact.append(f"{checkpoint} was written by {written_by} processes, and this run has {num_processes}")
    return inexact
