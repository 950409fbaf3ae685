"""Rows and texts of files: equal to what other writers wrote, and errors that name the file, the line and the fault."""

import bz2
import csv
import gzip
import json
import lzma
import re

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neobert_hf.data.rows import Row, read_rows, read_text_column, read_texts

ROWS = [{"text": 'says "hi"', "label": "1"}, {"text": "a,b\u2028c", "label": "x y"}, {"text": "", "label": "z"}]
COLUMNS = r"columns in 1 lines, but 2 columns have a name \(a, b\)"


def zstd(content):
    """Compress in two frames, as `zstd` does for several files or for a growing log."""
    half = len(content) // 2
    return b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))


COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def written(folder, suffix, rows=ROWS, compression="", encoding="utf-8"):
    file = folder / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        return file
    with file.open("w", encoding=encoding, newline="") as stream:
        if suffix == ".csv":
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        elif suffix == ".tsv":
            stream.writelines("\t".join(line) + "\n" for line in [rows[0], *(row.values() for row in rows)])
        elif suffix == ".json":
            stream.write("\n " + json.dumps(rows, indent=1))
        else:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    compressed = file.with_name(f"{file.name}{compression}")
    compressed.write_bytes(COMPRESS[compression](file.read_bytes()))
    return compressed


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("end, place", [("jsonl", "line 1"), ("json", "item 1"), ("csv", "line 2"), ("tsv", "line 2")])
def test_the_rows_of_every_format_are_those_written_with_their_places(tmp_path, end, place, compression):
    file = written(tmp_path, f".{end}", compression=compression, encoding="utf-8-sig")
    rows = list(read_rows(file))
    assert [row.values for row in rows] == ROWS
    assert rows[0].place == f"{file}, {place}"


def test_parquet_gives_the_columns_that_are_asked_for(tmp_path):
    file = written(tmp_path, ".parquet")
    assert list(read_rows(file)) == [Row(f"{file}, row {i}", row) for i, row in enumerate(ROWS, 1)]
    assert [row.values for row in read_rows(file, ["label"])] == [{"label": row["label"]} for row in ROWS]
    with pytest.raises(ValueError, match=r"rows\.parquet, row 1: no column 'body'; .*, one of text, label"):
        list(read_texts(file, "body"))


FIELDS = st.text(st.characters(exclude_characters="\t\r\n\0", codec="utf-8"))


@pytest.mark.slow
@given(st.lists(st.lists(FIELDS, min_size=2, max_size=2), min_size=1))
def test_a_tab_separated_file_keeps_every_character_but_tabs_line_ends_and_nul(tmp_path_factory, rows):
    """A mark inside of a field says that no mark of the file encloses one."""
    file, rows = tmp_path_factory.mktemp("tsv") / "rows.tsv", [*rows, ['7" wide', ""]]
    file.write_text("first\tsecond\n" + "".join("\t".join(row) + "\n" for row in rows), "utf-8", newline="\n")
    assert [list(row.values.values()) for row in read_rows(file)] == rows


def as_excel(field):
    """Excel's text with tabs has marks around a field with a mark, a comma, a tab or a line end."""
    return '"' + field.replace('"', '""') + '"' if re.search('[",\t\r\n]', field) else field


ENDS = st.text(st.sampled_from('"\t\n\r, ab\ufeff')) | st.text(st.characters(exclude_characters="\0", codec="utf-8"))


@given(st.lists(st.lists(ENDS, min_size=2, max_size=2), min_size=1), st.sampled_from(["pandas", "R", "Excel"]))
def test_tsv_whose_marks_enclose_fields_gives_the_fields_that_were_written(tmp_path_factory, rows, program):
    """pandas writes by `csv`; with QUOTE_ALL also as R does."""
    file, names = tmp_path_factory.mktemp("tsv") / "rows.csv", ["first", "second"]
    with file.open("w", encoding="utf-16", newline="") as stream:
        if program == "Excel":
            stream.writelines("\t".join(map(as_excel, row)) + "\r\n" for row in [names, *rows])
        else:
            quoting = csv.QUOTE_ALL if program == "R" else csv.QUOTE_MINIMAL
            csv.writer(stream, "excel-tab", quoting=quoting).writerows([names, *rows])
    assert [list(row.values.values()) for row in read_rows(file)] == rows


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        (['a\t"one"'], ['"one"']),
        (['a\t"one, two"', "b\tthree, four"], ['"one, two"', "three, four"]),
        (['a\t"one, two"', "b\tthree"], ["one, two", "three"]),
        (['a\t"say ""no"""', "b\tthree, four"], ['say "no"', "three, four"]),
        (['a\t"one', "b\ttwo"], ['"one', "two"]),
        (['a\tone "two"'], ['one "two"']),
    ],
)
@pytest.mark.parametrize("compression", ["", ".gz"])
def test_the_whole_file_decides_what_quotation_marks_of_tsv_are(tmp_path, lines, fields, compression):
    """Marks around fields, as of pandas, R and Excel, or characters of the texts, as in GLUE."""
    file = tmp_path / f"a.tsv{compression}"
    file.write_bytes(COMPRESS[compression]("\n".join(["label\ttext", *lines]).encode()))
    assert [row.values["text"] for row in read_rows(file)] == fields


def test_fields_of_csv_keep_quotes_commas_line_breaks_and_any_length(tmp_path):
    """pandas writes the file."""
    import pandas

    texts = ['a "quoted" word', "one, two", "line\nbreak\r\nand another", "x" * 200_000]
    texts += ["2020-01-01", " NA ", "caf\u00e9"]
    pandas.DataFrame({"text": texts}).to_csv(tmp_path / "a.csv", index=False)
    assert [row.values["text"] for row in read_rows(tmp_path / "a.csv")] == texts


@pytest.mark.parametrize("separator, first", [(",", ""), (";", ""), (";", "sep=;\n"), ("\t", "")])
def test_the_first_line_of_csv_tells_what_separates_its_fields(tmp_path, separator, first):
    """As spreadsheets save it: semicolons where the comma separates decimals, a byte order mark, line breaks inside quotes."""
    texts = ["Größe, 3; mit Komma", "漢字", "says so"] + ([] if separator == "\t" else ["two\nlines", 'a "word"'])
    with (tmp_path / "A.CSV").open("w", encoding="utf-8-sig", newline="") as stream:
        stream.write(first)
        writer = csv.writer(stream, delimiter=separator)
        writer.writerows([["text", "label"], *([text, "1,5"] for text in texts)])
    rows = list(read_rows(tmp_path / "A.CSV"))
    assert [row.values for row in rows] == [{"text": text, "label": "1,5"} for text in texts]
    lines = [int(row.place.rpartition(" ")[2]) for row in rows]  # where a row begins
    assert lines == [number + bool(first) for number in (2, 3, 4, 5, 7)[: len(texts)]]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_file_without_a_line_of_names_takes_given_names_and_a_row_with_more_columns_is_a_fault(tmp_path, suffix):
    """The files of STS-B: tabs in spite of the suffix, ordinary quotation marks, and more columns in some lines."""
    lines = ['a\t1.5\tsays "yes, or no, or both"\n', 'b\t2\t"open\tmore\tcolumns\n']
    (tmp_path / f"a{suffix}").write_text("".join(lines))
    names = ["genre", "score", "text"]
    good, bad = read_rows(tmp_path / f"a{suffix}", column_names=names, is_strict=False)
    assert good.values == {"genre": "a", "score": "1.5", "text": 'says "yes, or no, or both"'}
    message = r"5 columns in 1 lines, but 3 columns have a name \(genre, score, text\); quote or replace each '\\t' inside a text"
    assert bad.place.endswith("line 2") and re.match(message, bad.fault)
    with pytest.raises(ValueError, match=r", line 1: 3 columns in 1 lines, but 4 columns have a name \(genre, score"):
        list(read_rows(tmp_path / f"a{suffix}", column_names=["genre", "score", "text", "more"]))


def test_a_text_file_is_read_by_paragraph_by_line_or_as_one_document(tmp_path):
    text, file = "\ufeff\n\na b\nc\n\n\nd\r\n\r\ne\n\n\n\nf", tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress(text.encode()))
    expected = ((3, "a b\nc\n"), (7, "d\r\n"), (9, "e\n"), (13, "f"))
    assert list(read_texts(file)) == [(f"{file}, line {line}", part) for line, part in expected]
    lines = [line for _, line in read_texts(file, sample_by="line")]
    assert lines == text[1:].splitlines()
    assert [document for _, document in read_texts(file, sample_by="document")] == [text[1:]]


def test_json_may_hold_the_texts_themselves(tmp_path):
    for content, place in (('["one", "two"]', "item"), ('"one"\n"two"', "line")):
        file = tmp_path / "a.json"
        file.write_text(content)
        assert read_text_column([file], "text") == [(f"{file}, {place} 1", "one"), (f"{file}, {place} 2", "two")]


def test_a_missing_text_is_empty_and_a_lone_surrogate_a_question_mark_or_both_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "a \\ud800 b \\ud83d\\ude00"}\n{"text": null}\n{}\n')
    assert [text for _, text in read_texts(tmp_path / "a.jsonl")] == ["one", "a ? b \U0001f600", "", ""]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: text has a lone surrogate"):
        read_text_column([tmp_path / "a.jsonl"], "text")
    for value, message in (('{"text": null}', "text is None, a NoneType"), ("{}", "no column 'text'")):
        (tmp_path / "b.jsonl").write_text('{"text": "one"}\n' + value)
        with pytest.raises(ValueError, match=rf"b\.jsonl, line 2: {message}"):
            read_text_column([tmp_path / "b.jsonl"], "text")


@pytest.mark.parametrize("value", [["a", "b"], 0, 1.5, True, {"a": "b"}, []])
def test_a_text_that_is_not_a_string_is_refused_by_file_place_and_type(tmp_path, value):
    """The tokenizer would take two strings for a pair of sentences."""
    rows = [{"text": None}, {"text": value}]
    for suffix, place in ((".jsonl", "line 2"), (".json", "item 2"), (".parquet", "row 2")):
        file = written(tmp_path, suffix, rows)
        with pytest.raises(ValueError, match=f"{file}, {place}: text is .*, a {type(value).__name__}; every text must"):
            list(read_texts(file))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_kind_of_line_end_and_utf_16_with_its_mark_are_read(tmp_path, suffix, encoding, end):
    """As Excel for Mac ("CSV (Macintosh)") and Excel's "Unicode text" save them."""
    rows = [{"text": "Größe 漢字", "label": "x y"}, {"text": "two", "label": "z"}]
    file = written(tmp_path, suffix, rows)
    text = file.read_bytes().decode().replace("\r\n", "\n").replace("\n", end)
    file.write_bytes(text.encode(encoding))
    assert [row.values for row in read_rows(file)] == rows


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_two_columns_of_one_name_are_refused(tmp_path, suffix):
    file = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"], ["c"]], names=["text", "text", "label"]), file)
    else:
        file.write_text("text,text,label\na,b,c\n".replace(",", {".csv": ",", ".tsv": "\t"}[suffix]))
    with pytest.raises(ValueError, match="two columns have the name 'text'; rename one of them"):
        list(read_rows(file))


@pytest.mark.parametrize(
    ("header", "names"), [(",,text", ["column 1", "column 2", "text"]), (",text, ", ["column 1", "text", "column 3"])]
)
def test_several_columns_without_a_name_are_named_by_their_numbers(tmp_path, header, names):
    (tmp_path / "rows.csv").write_text(f"{header}\na,b,c\n")
    assert [row.values for row in read_rows(tmp_path / "rows.csv")] == [dict(zip(names, "abc"))]


@pytest.mark.parametrize(
    ("name", "content", "good", "bad"),
    [
        ("a.jsonl", '{"a": "1"}\n{"a": \n\n{"a": "2"}\nnonsense\n', "12", {2: "not JSON", 5: "not JSON"}),
        ("a.csv", "a,b\n1,x\n2\n\n3,x,y\n4,x\n", "14", {3: f"1 {COLUMNS}", 5: f"3 {COLUMNS}"}),
        ("a.csv", 'a,b\n1,x\n"2,x\n3,x\n4,x\n', "1", {3: r"end of data in 3 lines\); .* close each quotation"}),
        ("a.csv", 'a,b\n1,x\n2,"x\n3,x\n4,x\n', "1", {3: "unexpected end of data in 3 lines"}),
        ("a.csv", 'a,b\n1,x\n"2" x,y\n3,x\n', "13", {3: "',' expected after"}),
        ("a.csv", 'a,b\n1,x\n"2,x\n3,x\n4,"x"\n5,x\n', "15", {3: "',' expected after '\"' in 3 lines"}),
        ("a.csv", 'a,b\n1,x\n"2,x\n3,x\n4",x,y\n5,x\n', "15", {3: "3 columns in 3 lines, .* close each quotation"}),
        ("a.tsv", 'a\tb\n1\tx\n2\n"3\tx\n4\tx\ty\n', '1"3', {3: f"1 {COLUMNS}", 5: f"3 {COLUMNS}.* replace each"}),
    ],
)
def test_rows_that_cannot_be_read_are_named_and_the_others_are_read(tmp_path, name, content, good, bad):
    file = tmp_path / name
    file.write_text(content)
    rows = list(read_rows(file, is_strict=False))
    assert "".join(row.values["a"] for row in rows if not row.fault) == good
    faults = [row for row in rows if row.fault]
    assert [row.place for row in faults] == [f"{file}, line {number}" for number in bad]
    assert all(re.search(reason, row.fault) for reason, row in zip(bad.values(), faults, strict=True))
    with pytest.raises(ValueError, match=f"^{file}, line {min(bad)}: .*{bad[min(bad)]}"):
        list(read_rows(file))


def test_a_file_of_names_alone_has_no_row(tmp_path):
    for content in ("a,b", "a,b\n", "sep=,\na,b\n", ""):
        (tmp_path / "a.csv").write_text(content)
        assert list(read_rows(tmp_path / "a.csv")) == []


def test_blank_lines_before_the_names_are_no_rows(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("\n\na;b\n1;2\n")
    assert list(read_rows(file)) == [Row(f"{file}, line 4", {"a": "1", "b": "2"})]


def test_a_blank_line_in_a_single_column_is_an_empty_text(tmp_path):
    for suffix in (".csv", ".tsv"):
        (tmp_path / f"a{suffix}").write_text("text\none\n\ntwo\n")
        assert [row.values["text"] for row in read_rows(tmp_path / f"a{suffix}")] == ["one", "", "two"]


FINE = b"text\n" + b"fine\n" * 99_999


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\n\n{"text": \n', r", line 3: this is not JSON \(.*one object on each line, or"),
        ("a.jsonl", b'{"text": "one"}\n[1, 2]\n', ", line 2 has type list, not object"),
        ("a.jsonl", b'{"text": "one"}\n' + b"[" * 100_000, ", line 2: this is not JSON"),
        ("a.jsonl", b'{"text": "one"}\n' * 9000 + b'{"text": "\xff"}\n', ", line 9001 is not UTF-8; save it as UTF-8"),
        ("a.json", b'[{"text": "one"}', ": this is not JSON"),
        ("a.json", b'[{"text": "one"}, 5]', ", item 2 has type int, not object"),
        ("a.json", b'[{"body": "one"}]', ", item 1: no column 'text'; .*, one of body"),
        ("a.txt", FINE + b"a\xffb\n", ", line 100001 is not UTF-8; save it as UTF-8"),
        ("a.txt", b"fine\ncut \xc3", ", line 2 is not UTF-8"),
        ("a.txt.gz", gzip.compress(FINE)[:-40], " cannot be read; it is damaged"),
        ("a.txt.zst", zstd(FINE)[:-9], " cannot be read; it is damaged"),
        ("a.txt.bz2", bz2.compress(FINE)[:-9], " cannot be read; it is damaged"),
        ("a.txt.xz", lzma.compress(FINE)[:-9], " cannot be read; it is damaged"),
        ("a.txt.xz", b"plain text", " cannot be read; it is damaged, or its suffix is wrong"),
        ("a.txt", "text".encode("utf-16") + b"x", " is not utf-16.* truncated data"),
        ("a.txt.zst", b"plain text", " cannot be read; it is damaged"),
        ("a.txt.gz", b"plain text", " cannot be read; it is damaged"),
        ("a.txt.bz2", b"plain text", " cannot be read; it is damaged"),
        ("a.csv", b"number,body\n1,one\n", ", line 2: no column 'text'; .*, one of number, body"),
        ("a.csv", b'number,text\n1,one\n2,"two\n3,\n', r", line 3: this is not CSV \(unexpected end of data"),
        ("a.csv", b'number,text\n1,"one\nmore",2\n', ", line 2: 3 columns in 2 lines, but 2 columns have a name"),
        ("a.csv", b'number,text\n1,"one" two\n', r", line 2: this is not CSV \(',' expected after '\"'"),
        ("a.csv", FINE + b"caf\xe9\n", ", line 100001 is not UTF-8"),
        ("a.csv", "text,b\né,x\n".encode("utf-16-le"), ", line 2 is not UTF-8"),
        ("a.csv.gz", gzip.compress(FINE)[:-40], " cannot be read; it is damaged"),
        ("a.tsv", b"text\n\xff\n", ", line 2 is not UTF-8"),
        ("a.parquet", b"PAR1 and so on", " cannot be read; it is damaged"),
        ("a.doc", b"abc", r" has the suffix '\.doc'; choose one of \.jsonl"),
    ],
)
def test_the_error_for_damaged_content_names_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / name}{message}"):
        list(read_texts(tmp_path / name))


def test_a_file_that_does_not_exist_and_one_without_rows_are_named(tmp_path):
    for suffix in (".jsonl", ".json.gz", ".csv", ".tsv.xz", ".parquet"):
        with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/no{suffix}'"):
            list(read_rows(tmp_path / f"no{suffix}"))
    for name, content in (("a.jsonl", "\n"), ("a.jsonl", '{"text": ""}'), ("a.txt", "\ufeff"), ("a.txt", " \n\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name}: no text; give a file with at least one text"):
            read_text_column([tmp_path / name], "text")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")  # an empty line keeps its place
    assert [text for _, text in read_text_column([tmp_path / "a.txt"], "text")] == ["one", "", "two"]
