"""Predictions in files: other readers find the rows that were written."""

import csv
import datetime
import json

import pyarrow.parquet
import pytest
from conftest import largest_file

from neobert_hf.finetuning.predictions import write_predictions

ROWS = [
    {"text": 'two\nlines; "größer", 漢字', "label": "a", "prediction": ["x", "y"], "probability_a": 0.25},
    {"text": "no label", "prediction": [], "probability_a": 1.0},
]
FULL = [{"label": None, **row} for row in ROWS]


def test_csv_has_one_cell_for_each_value_and_lists_as_json(tmp_path):
    write_predictions(tmp_path / "new/a.csv", ROWS)
    with (tmp_path / "new/a.csv").open(newline="", encoding="utf-8") as stream:
        found = list(csv.DictReader(stream))
    assert [row["text"] for row in found] == [row["text"] for row in ROWS]
    assert [json.loads(row["prediction"]) for row in found] == [["x", "y"], []]
    assert [float(row["probability_a"]) for row in found] == [0.25, 1.0]
    assert [row["label"] for row in found] == ["a", ""]


def test_json_lines_and_parquet_keep_lists(tmp_path):
    write_predictions(tmp_path / "a.jsonl", ROWS)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text("utf-8").splitlines()] == ROWS
    write_predictions(tmp_path / "a.parquet", ROWS)
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist() == FULL


def test_a_file_without_a_name_is_csv_unless_a_row_holds_a_list(tmp_path):
    write_predictions(None, ROWS[1:] + ROWS[:1], tmp_path)
    write_predictions(None, [{"prediction": "a"}], tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"predictions.jsonl", "predictions.csv"}
    with pytest.raises(FileExistsError, match=r"predictions\.csv exists; name another file, or give overwrite"):
        write_predictions(None, [{"prediction": "b"}], tmp_path)


def test_dates_of_parquet_become_texts_in_json_lines(tmp_path):
    write_predictions(tmp_path / "a.jsonl", [{"day": datetime.date(2026, 1, 2)}])
    assert json.loads((tmp_path / "a.jsonl").read_text("utf-8")) == {"day": "2026-01-02"}


def test_a_value_that_a_format_cannot_hold_is_one_line_and_json_lines_hold_all(tmp_path):
    surrogate, mixed = [{"id": "\ud800"}], [{"id": "x"}, {"id": 1}]
    for name, rows in (("a.csv", surrogate), ("a.parquet", surrogate), ("b.parquet", mixed)):
        with pytest.raises(ValueError, match=r"cannot hold a value of the rows \(.*\); a file \.jsonl holds all"):
            write_predictions(tmp_path / name, rows)
    assert not list(tmp_path.iterdir())
    write_predictions(tmp_path / "a.jsonl", surrogate + mixed)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text("utf-8").splitlines()] == surrogate + mixed


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, suffix):
    with largest_file(1000), pytest.raises(OSError):
        write_predictions(tmp_path / f"a{suffix}", [{"text": str(i) * 9} for i in range(3000)])
    assert list(tmp_path.iterdir()) == []
