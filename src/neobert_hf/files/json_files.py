"""JSON files that are read; a fault names the file."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """Return the content of a JSON file; the ValueError for a damaged one names it."""
    try:
        return json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON in UTF-8 ({error}); download or copy it again") from error


def read_json_object(file: Path) -> dict:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: The file is missing or damaged; the message names the file and the fault.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    if not isinstance(content := read_json(file), dict):
        raise ValueError(f"{file} is damaged: it holds a {type(content).__name__}, not an object")
    return content
