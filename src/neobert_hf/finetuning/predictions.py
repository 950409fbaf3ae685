"""Predictions in a file, as CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from ..files.messages import say
from ..files.output import check_file, writing

PREDICTION_FORMATS = (".csv", ".jsonl", ".parquet")
PREDICTION_COLUMNS = ("prediction", "probability")  # what `Job.prediction_rows` adds to the columns of a file


def check_predictions_file(file: Path, overwrite: bool, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse a file of predictions that has another suffix, or that is there; arguments as of `check_file`.

    Raises:
        ValueError: The suffix is none of `PREDICTION_FORMATS`.
        FileExistsError: The file exists, or is an input.
    """
    if file.suffix not in PREDICTION_FORMATS:
        raise ValueError(
            f"{file} has none of the suffixes {', '.join(PREDICTION_FORMATS)}; choose one for the predictions"
        )
    check_file(file, overwrite, inputs)


def write_predictions(
    file: str | Path | None, rows: Sequence[dict], folder: str | Path = ".", overwrite: bool = False
) -> None:
    """Write rows to a file in the format of its suffix.

    Args:
        file: File with the suffix .csv, .jsonl or .parquet; its folder is made if there is none. None takes predictions.csv in
            `folder`, or predictions.jsonl if a row holds a list.
        rows: One dict for each row, a missing column is empty. In CSV, lists and dicts are written as JSON.
        folder: Where the file is if its name is not given.
        overwrite: Replace a file.

    Raises:
        ValueError: The format cannot hold a value, such as a column of numbers and texts in Parquet.
        FileExistsError: The file exists.
        OSError: The file cannot be written.
    """
    has_list = any(isinstance(value, list | dict) for row in rows for value in row.values())
    file = Path(file or Path(folder, f"predictions.{'jsonl' if has_list else 'csv'}"))
    check_file(file, overwrite)
    columns = dict.fromkeys(name for row in rows for name in row)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with writing(file) as stream:
            _write(file.suffix, stream, rows, columns)
    except (UnicodeError, pyarrow.ArrowException) as error:
        remedy = "a file .jsonl holds all values" if file.suffix != ".jsonl" else "correct it"
        raise ValueError(f"{file} cannot hold a value of the rows ({error}); {remedy}") from error
    say(f"wrote {len(rows)} predictions to {file}")


def _write(suffix: str, stream: BinaryIO, rows: Sequence[dict], columns: Collection[str]) -> None:
    if suffix == ".parquet":
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
        return pyarrow.parquet.write_table(table, stream)
    # half of a pair of surrogates, which JSON can hold, becomes its escape sequence in JSON
    text = io.TextIOWrapper(stream, "utf-8", "backslashreplace" if suffix == ".jsonl" else "strict", newline="")
    if suffix == ".jsonl":
        text.writelines(_json(row) + "\n" for row in rows)
    else:
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    text.detach()


def _cell(value: Any) -> Any:
    return _json(value) if isinstance(value, list | dict) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # Parquet has dates, which JSON lacks
