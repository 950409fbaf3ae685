"""Rows of files: equal to what pandas' and the standard library's writers wrote, and errors that name the line."""

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow", reason="tables need pyarrow (pip install -e .[train])")

import pyarrow.parquet

from neobert_hf.data.tables import numbered_rows, tab_separated

ROWS = [{"text": 'says "hi"', "label": "1"}, {"text": "a,b\u2028c", "label": "x y"}]


def written(folder, suffix, rows=ROWS):
    file = folder / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif suffix == ".csv":
        with file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == ".tsv":
        lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
        file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


@pytest.mark.parametrize("suffix, first_line", [(".jsonl", 1), (".csv", 2), (".tsv", 2), (".parquet", 1)])
def test_the_rows_of_every_format_are_those_written_with_their_line_numbers(tmp_path, suffix, first_line):
    rows = list(numbered_rows(written(tmp_path, suffix)))
    assert rows == [(first_line + i, row) for i, row in enumerate(ROWS)]


@given(
    st.lists(
        st.lists(st.text(st.characters(exclude_characters="\t\r\n", codec="utf-8")), min_size=2, max_size=2), min_size=1
    )
)
def test_a_tab_separated_file_keeps_every_character_but_tabs_and_line_ends(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("tsv") / "rows.tsv"
    file.write_text("a\tb\n" + "".join("\t".join(row) + "\n" for row in rows), "utf-8", newline="\n")
    assert [list(row.values()) for _, row in tab_separated(file)] == rows


def test_a_file_without_header_takes_the_given_names_and_ignores_further_columns(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"\xef\xbb\xbf1\t2\t3\r\n")
    assert list(tab_separated(tmp_path / "a.tsv", ("x", "y"))) == [(1, {"x": "1", "y": "2"})]


def test_a_text_in_csv_may_be_longer_than_pythons_default(tmp_path):
    (row,) = numbered_rows(written(tmp_path, ".csv", [{"text": "long " * 40_000, "label": "1"}]))
    assert row == (2, {"text": "long " * 40_000, "label": "1"})


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_two_columns_of_one_name_are_refused(tmp_path, suffix):
    file = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"], ["c"]], names=["text", "text", "label"]), file)
    else:
        file.write_text("text,text,label\na,b,c\n".replace(",", {".csv": ",", ".tsv": "\t"}[suffix]))
    with pytest.raises(ValueError, match="two columns have the name 'text'; rename one of them"):
        list(numbered_rows(file))


@pytest.mark.parametrize("suffix, separator", [(".tsv", "\t"), (".csv", ",")])
def test_a_line_with_more_columns_than_the_first_line_loses_nothing_silently(tmp_path, suffix, separator):
    file = tmp_path / f"rows{suffix}"
    file.write_text(f"text{separator}label\na{separator}1\nb{separator}c{separator}1\n")
    with pytest.raises(ValueError, match=rf"rows\{suffix}, line 3: 3 columns, but the first line names 2"):
        list(numbered_rows(file))


def test_a_truncated_line_is_an_error_that_names_it_unless_the_caller_collects_it(tmp_path):
    (tmp_path / "a.tsv").write_text("x\ty\n1\t2\n3\n4\t5\n")
    with pytest.raises(ValueError, match=r"a\.tsv, line 3: 1 columns instead of 2 \(x, y\)"):
        list(numbered_rows(tmp_path / "a.tsv"))
    truncated = []
    assert [number for number, _ in tab_separated(tmp_path / "a.tsv", None, truncated)] == [2, 4]
    assert truncated == [3]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"a": 1}\n{"a"', "line 2: not JSON"),
        ("a.csv", b"a\n\xff\n", "is not UTF-8"),
        ("a.tsv", b"a\n\xff\n", "is not UTF-8"),
        ("a.parquet", b"PAR1", "is not a readable Parquet file"),
        ("a.txt", b"a", "has the suffix '.txt'; choose .jsonl"),
    ],
)
def test_a_file_in_another_format_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(numbered_rows(tmp_path / name))
