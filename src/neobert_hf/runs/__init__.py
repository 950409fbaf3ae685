"""What every training and evaluation shares: arguments, one-line errors, run folders, checkpoints, resume, records."""

from importlib import import_module
from pathlib import Path

# Folder of the small embedding model that ships with the package; it was trained on Python's documentation.
MINI_MODEL_PATH = str(Path(__file__).parents[1] / "mini")

# The arguments of trainings need accelerate and datasets, so a name is imported when it is used.
_MODULES = {
    "adapters": ("lora_config", "open_adapter", "save_adapter"),
    "allocator": ("tune_allocator",),
    "arguments": ("FineTuningArguments", "PrecisionArguments", "ResumeArguments", "default_learning_rate"),
    "commands": ("CommandParser", "one_line", "run_command", "run_script"),
    "folders": ("begin_or_resume", "last_complete_checkpoint", "lock_run", "train_or_resume"),
    "manifests": ("CheckedCheckpoints",),
    "record": ("write_record",),
    "signals": ("SaveOnTerminate",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["MINI_MODEL_PATH", *_MODULE_OF]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
