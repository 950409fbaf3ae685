"""Which files of a folder belong to a model."""

from pathlib import Path

from .saved_model import read_modules
from .trust import MODEL_FILES


def replaceable_files(folder: Path, *more: str) -> tuple[str, ...]:
    """Return patterns of the files of a model that a folder holds, and more patterns; none if it holds no model."""
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json", "modules.json")):
        return ()
    places = ("", *(path for path, _ in read_modules(folder)))
    return (*(str(Path(place, name)) for place in places for name in MODEL_FILES), *more)
