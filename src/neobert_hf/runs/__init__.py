"""What every training and evaluation shares: arguments, one-line errors, run folders, checkpoints, resume."""

from pathlib import Path

# Folder of the small embedding model that ships with the package; it was trained on Python's documentation.
MINI_MODEL_PATH = str(Path(__file__).parents[1] / "mini")
