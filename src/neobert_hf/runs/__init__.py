"""What every training and evaluation shares: arguments, one-line errors, run folders, checkpoints, resume, records."""

from pathlib import Path

from ..lazy import lazy_names

# Folder of the small embedding model that ships with the package; it was trained on Python's documentation.
MINI_MODEL_PATH = str(Path(__file__).parents[1] / "mini")

# The arguments of trainings need accelerate and datasets, so a name is imported when it is used.
NAMES_OF = {
    "adapters": ("lora_config", "open_adapter", "save_adapter"),
    "allocator": ("tune_allocator",),
    "arguments": ("FineTuningArguments", "PrecisionArguments", "ResumeArguments", "default_learning_rate"),
    "commands": ("CommandParser", "one_line", "run_command", "run_script"),
    "folders": ("begin_or_resume", "curve_of", "last_complete_checkpoint", "lock_run", "train_or_resume"),
    "machine": ("environment",),
    "manifests": ("CheckedCheckpoints",),
    "record": ("write_record",),
    "signals": ("SaveOnTerminate",),
}
__getattr__, __dir__, __all__ = lazy_names(__name__, NAMES_OF)
__all__ += ["MINI_MODEL_PATH"]
