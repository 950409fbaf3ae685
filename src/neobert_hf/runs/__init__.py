"""What every training and evaluation shares: arguments, checkpoints, resume, progress."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

# The arguments of trainings need accelerate and datasets, so a name is imported when it is used.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

if TYPE_CHECKING:
    from .allocator import tune_allocator as tune_allocator
    from .arguments import (
        FineTuningArguments as FineTuningArguments,
        PrecisionArguments as PrecisionArguments,
        ResumeArguments as ResumeArguments,
        default_learning_rate as default_learning_rate,
    )
    from .commands import CommandParser as CommandParser, run_script as run_script
    from .machine import environment as environment, limit_threads as limit_threads
    from .manifests import CheckedCheckpoints as CheckedCheckpoints
    from .resume import (
        begin_or_resume as begin_or_resume,
        curve_of as curve_of,
        last_complete_checkpoint as last_complete_checkpoint,
        lock_run as lock_run,
        train_or_resume as train_or_resume,
    )
    from .signals import SaveOnTerminate as SaveOnTerminate
