"""What every training and evaluation shares: arguments, one-line errors, run folders, checkpoints, resume, records."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..lazy import lazy_names

# Folder of the small embedding model that ships with the package; it was trained on Python's documentation.
MINI_MODEL_PATH = str(Path(__file__).parents[1] / "mini")

# The arguments of trainings need accelerate and datasets, so a name is imported when it is used.
NAMES_OF = {
    "adapters": ("lora_config", "open_adapter", "save_adapter"),
    "allocator": ("tune_allocator",),
    "arguments": ("FineTuningArguments", "PrecisionArguments", "ResumeArguments", "default_learning_rate"),
    "commands": ("CommandParser", "run_script"),
    "errors": ("one_line", "run_command"),
    "folders": ("begin_or_resume", "curve_of", "last_complete_checkpoint", "lock_run", "train_or_resume"),
    "machine": ("environment", "limit_threads"),
    "manifests": ("CheckedCheckpoints",),
    "record": ("write_record",),
    "signals": ("SaveOnTerminate",),
}
__getattr__, __dir__, __all__ = lazy_names(__name__, NAMES_OF)
__all__ += ["MINI_MODEL_PATH"]

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from .adapters import lora_config as lora_config, open_adapter as open_adapter, save_adapter as save_adapter
    from .allocator import tune_allocator as tune_allocator
    from .arguments import (
        FineTuningArguments as FineTuningArguments,
        PrecisionArguments as PrecisionArguments,
        ResumeArguments as ResumeArguments,
        default_learning_rate as default_learning_rate,
    )
    from .commands import CommandParser as CommandParser, run_script as run_script
    from .errors import one_line as one_line, run_command as run_command
    from .folders import (
        begin_or_resume as begin_or_resume,
        curve_of as curve_of,
        last_complete_checkpoint as last_complete_checkpoint,
        lock_run as lock_run,
        train_or_resume as train_or_resume,
    )
    from .machine import environment as environment, limit_threads as limit_threads
    from .manifests import CheckedCheckpoints as CheckedCheckpoints
    from .record import write_record as write_record
    from .signals import SaveOnTerminate as SaveOnTerminate
