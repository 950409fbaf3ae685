"""Predictions in a file, as CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

from ..data.files import writing
from ..data.labelled import PREDICTION_FORMATS


def write_predictions(file: str | Path, rows: Sequence[dict]) -> None:
    """Write rows to a file in the format of its suffix.

    Args:
        file: File with the suffix .csv, .jsonl or .parquet; its folder is made if there is none.
        rows: One dict for each row, with the same columns in all. In CSV, lists and dicts are written as JSON.

    Raises:
        ValueError: The suffix is another.
        OSError: The file cannot be written.
    """
    file = Path(file)
    if file.suffix not in PREDICTION_FORMATS:
        raise ValueError(f"{file} has none of the suffixes {', '.join(PREDICTION_FORMATS)}; choose one")
    file.parent.mkdir(parents=True, exist_ok=True)
    with writing(file) as stream:
        if file.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), stream)
            return
        with io.TextIOWrapper(stream, "utf-8", newline="") as text:
            if file.suffix == ".jsonl":
                text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            else:
                writer = csv.DictWriter(text, rows[0])
                writer.writeheader()
                writer.writerows(map(_cells, rows))
            text.flush()
            text.detach()


def _cells(row: dict) -> dict:
    return {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
        for name, value in row.items()
    }
