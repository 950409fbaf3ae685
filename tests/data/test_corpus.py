"""`Corpus` reads every kind of file, and its errors name the file, the line and the fault."""

import bz2
import csv
import gzip
import json
import lzma
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neobert_hf.data import corpus as corpus_module
from neobert_hf.data.corpus import Corpus

TEXTS = ["one fox", "two dogs\nand a cat", "three"]


@pytest.fixture
def files(tmp_path):
    lines = "".join(json.dumps({"text": text, "number": i}) + "\n" for i, text in enumerate(TEXTS))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.txt").write_text("\n\n".join(TEXTS))
    (tmp_path / "b_bom.txt").write_text("\n\n".join(TEXTS), "utf-8-sig")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "d.parquet")
    (tmp_path / "e.json").write_text("\n " + json.dumps([{"text": text} for text in TEXTS], indent=1))
    (tmp_path / "f.json").write_text(json.dumps(TEXTS))
    (tmp_path / "i.jsonl.zst").write_bytes(zstd(lines.encode()))
    (tmp_path / "g.txt.bz2").write_bytes(bz2.compress("\n\n".join(TEXTS).encode()))
    with (tmp_path / "j.csv").open("w", encoding="utf-8-sig", newline="") as handle:
        csv.writer(handle).writerows([["number", "text"], *enumerate(TEXTS)])
    (tmp_path / "k.csv.gz").write_bytes(gzip.compress((tmp_path / "j.csv").read_bytes()))
    (tmp_path / "h [1].jsonl.xz").write_bytes(lzma.compress(b"\xef\xbb\xbf" + lines.encode()))
    return tmp_path


def zstd(content):
    """Compress in two frames, as `zstd` does for several files or for a growing log."""
    half = len(content) // 2
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))


KINDS = [
    "a.jsonl",
    "b.txt",
    "b_bom.txt",
    "c.jsonl.gz",
    "d.parquet",
    "e.json",
    "f.json",
    "g.txt.bz2",
    "h [1].jsonl.xz",
    "i.jsonl.zst",
    "j.csv",
    "k.csv.gz",
]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_documents_on_every_pass(files, name):
    corpus = Corpus([str(files / name)])
    assert list(corpus) == TEXTS
    assert list(corpus) == TEXTS
    assert corpus.source["files"][0]["bytes"] == (files / name).stat().st_size


def test_a_text_file_can_be_read_by_line_or_as_one_document(files):
    text = (files / "b.txt").read_text()
    assert [line for line in Corpus([str(files / "b.txt")], sample_by="line") if line] == [
        line for line in text.splitlines() if line
    ]
    assert list(Corpus([str(files / "b.txt")], sample_by="document")) == [text]


def test_a_missing_value_is_an_empty_document(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    assert list(Corpus([str(tmp_path / "a.jsonl")])) == ["one", "", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", r"empty\.txt is empty; remove it from files"),
        ("binary.txt", b"abc\0def", r"binary\.txt is binary"),
        ("latin.txt", "caf\u00e9 und weiter".encode("latin-1"), r"latin\.txt is not UTF-8 in line 1"),
        ("strange.doc", b"abc", r"strange\.doc has an unknown suffix; choose \.txt"),
    ],
)
def test_the_error_names_a_file_that_is_not_text(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Corpus([str(tmp_path / name)])


def test_sources_that_cannot_form_one_corpus_are_refused(files):
    with pytest.raises(ValueError, match="files of 2 kinds"):
        Corpus([str(files / "a.jsonl"), str(files / "b.txt")])
    with pytest.raises(ValueError, match=r"text_column='content' is not a column of .* it has number, text"):
        Corpus([str(files / "a.jsonl")], text_column="content")
    with pytest.raises(FileNotFoundError, match=r"no\.txt does not exist or is not a file"):
        Corpus([str(files / "no.txt")])
    with pytest.raises(ValueError, match="give exactly one of them"):
        Corpus([str(files / "a.jsonl")], dataset_name="some/thing")


def test_paragraphs_do_not_depend_on_the_size_of_the_read_blocks(tmp_path, monkeypatch):
    text = "\n\n\na b\nc\n\n\nd\r\n\r\ne\n\n\n\nf\n"
    (tmp_path / "a.txt").write_text(text, newline="")
    wanted = [each for each in text.replace("\r\n", "\n").split("\n\n") if each]
    for size in range(1, 30):
        monkeypatch.setattr(corpus_module, "READ_AT_ONCE", size)
        assert list(Corpus([str(tmp_path / "a.txt")])) == wanted


def test_fields_of_csv_keep_quotes_commas_line_breaks_and_any_length(tmp_path):
    """pandas writes the file."""
    pandas = pytest.importorskip("pandas", reason="datasets depends on it; the oracle of this test")
    texts = [
        'a "quoted" word',
        "one, two",
        "line\nbreak\r\nand another",
        "x" * 200_000,
        "2020-01-01",
        " NA ",
        "caf\u00e9",
    ]
    pandas.DataFrame({"text": texts}).to_csv(tmp_path / "a.csv", index=False)
    assert list(Corpus([str(tmp_path / "a.csv")])) == texts


def test_texts_that_look_like_dates_or_numbers_stay_unchanged(tmp_path):
    """A column of dates only, and dates below the rows from which a reader guesses the column type."""
    texts = ["2020-01-01", "2020-01-02T03:04:05", "12", "true", "null", '{"a": 1}', "caf\u00e9 \U0001f600", " \r\n "]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert list(Corpus([str(tmp_path / "a.jsonl")])) == texts
    (tmp_path / "dates.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:2]))
    assert list(Corpus([str(tmp_path / "dates.jsonl")])) == texts[:2]


def test_a_lone_surrogate_becomes_a_question_mark_or_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "a \\ud800 b \\ud83d\\ude00"}\n')
    assert list(Corpus([str(tmp_path / "a.jsonl")])) == ["one", "a ? b \U0001f600"]
    with pytest.raises(ValueError, match=r"a\.jsonl line 2: text has the lone surrogate '\\ud800' at character 2"):
        list(Corpus([str(tmp_path / "a.jsonl")], is_strict=True))
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl line 2: text is None, a NoneType; every text must be a string"):
        list(Corpus([str(tmp_path / "b.jsonl")], is_strict=True))


@pytest.mark.parametrize("value", [["a", "b"], 0, 1.5, True, {"a": "b"}, []])
def test_the_error_for_a_text_that_is_not_a_string_names_file_place_and_type(tmp_path, value):
    message = f"text is .*, a {type(value).__name__}; every text must be a string"
    rows = [{"text": "one"}, {"text": value}, {"text": "two"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=rf"a\.jsonl line 2: {message}"):
        list(Corpus([str(tmp_path / "a.jsonl")]))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=rf"b\.json item 2: {message}"):
        list(Corpus([str(tmp_path / "b.json")]))
    pq.write_table(pa.table({"text": [None, value]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=rf"c\.parquet row 2: {message}"):
        list(Corpus([str(tmp_path / "c.parquet")]))
    (tmp_path / "set").mkdir()
    shutil.copy(tmp_path / "c.parquet", tmp_path / "set")
    with pytest.raises(ValueError, match=rf"set row 2: {message}"):
        list(Corpus(dataset_name=str(tmp_path / "set")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "one"}\n\n{"text": \n',
            r"a\.jsonl line 3 is not JSON: .* one object on each line, or one list",
        ),
        ("a.jsonl", b'{"text": "one"}\n[1, 2]\n', r"a\.jsonl line 2 has type list, not object"),
        ("a.jsonl", b'{"text": "one"}\n5\n', r"a\.jsonl line 2 has type int, not object"),
        ("a.jsonl", b'{"text": "one"}\n' + b"[" * 100_000, r"a\.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"text": "one"}\n' * 9000 + b'{"text": "\xff"}\n', r"a\.jsonl is not UTF-8 in line 9001"),
        ("a.json", b'[{"text": "one"}', r"a\.json is not JSON"),
        ("a.json", b'[{"text": "one"}, 5]', r"a\.json item 2 has type int, not object"),
        ("a.json", b'[{"body": "one"}]', r"text_column='text' is not a column of .*a\.json; it has body"),
        ("a.json", b"[]", r"a\.json holds no document"),
        ("a.txt", b"fine\n" * 99_999 + b"a\xffb\n", r"a\.txt is not UTF-8 in line 100000; convert it"),
        ("a.txt", b"fine\ncut \xc3", r"a\.txt is not UTF-8 in line 2"),
        ("a.txt.gz", gzip.compress(b"fine\n" * 99_999)[:-40], r"a\.txt\.gz cannot be read; it is damaged"),
        ("a.txt.zst", zstd(b"fine\n" * 99_999)[:-9], r"a\.txt\.zst cannot be read; it is damaged"),
        ("a.txt.zst", b"plain text", r"a\.txt\.zst cannot be read; it is damaged or not of the kind"),
        ("a.txt.gz", b"plain text", r"a\.txt\.gz cannot be read; it is damaged or not of the kind"),
        ("a.txt.xz", b"plain text", r"a\.txt\.xz cannot be read"),
        ("a.txt.bz2", b"plain text", r"a\.txt\.bz2 cannot be read"),
        ("a.csv", b"number,body\n1,one\n", r"text_column='text' is not a column of .*a\.csv; it has body, number"),
        ("a.csv", b"text,text\n1,one\n", r"a\.csv has 2 columns 'text'"),
        ("a.csv", b"number,text\n", r"a\.csv holds no document"),
        (
            "a.csv",
            b"number,text\n1,one\n2,two, three\n",
            r"a\.csv line 3 ends a row of 3 fields where the header has 2",
        ),
        ("a.csv", b"number,text\n1,one\n2\n", r"a\.csv line 3 ends a row of 1 fields where the header has 2"),
        ("a.csv", b'number,text\n1,one\n2,"two\n', r"a\.csv line 3 is not CSV: unexpected end of data"),
        ("a.csv", b'number,text\n1,"one" two\n', r"a\.csv line 2 is not CSV: ',' expected after '\"'"),
        ("a.csv", b"text\n" + b"one\n" * 99_999 + b"caf\xe9\n", r"a\.csv is not UTF-8 in line 100001"),
        ("a.csv.gz", gzip.compress(b"text\n" + b"fine\n" * 99_999)[:-40], r"a\.csv\.gz cannot be read; it is damaged"),
        ("a.parquet", b"PAR1 and so on", r"a\.parquet cannot be read; it is damaged or not of the kind"),
        ("a.parquet.gz", b"x", r"a\.parquet\.gz has an unknown suffix"),
    ],
)
def test_the_error_for_damaged_content_names_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(Corpus([str(tmp_path / name)]))


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path):
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has 2 columns 'text'; rename all but the text"):
        Corpus([str(tmp_path / "a.parquet")])


def test_the_text_column_must_exist_in_every_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "two"}\n')
    with pytest.raises(ValueError, match=r"text_column='text' is not a column of .*b\.jsonl; it has body"):
        list(Corpus([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]))
    with pytest.raises(ValueError, match=r"files=\[\] names no file"):
        Corpus([])


@pytest.mark.parametrize("hashed_bytes", [1 << 20, 300])
def test_the_source_depends_on_the_content_and_not_on_the_folder_or_the_time_of_a_file(
    tmp_path, monkeypatch, hashed_bytes
):
    """The whole content is hashed, or ten samples of 30 bytes if it exceeds the limit."""
    monkeypatch.setattr(corpus_module, "HASHED_BYTES", hashed_bytes)
    monkeypatch.setattr(corpus_module, "SAMPLE_BYTES", 30)
    file = tmp_path / "a.txt"
    content = "".join(f"line {i}\n" for i in range(100, 200))
    file.write_text(content)
    source = Corpus([str(file)]).source
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(file, tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere/a.txt", (1, 1))
    assert Corpus([str(tmp_path / "elsewhere/a.txt")]).source == source
    changes = [("l" + content)[:-1], content[:-1] + "X", "X" + content[1:], content[:450] + "X" + content[450:-1]]
    changes += [content[:451] + "X" + content[452:]] if hashed_bytes > 900 else []
    for changed in changes:
        assert len(changed) == len(content)
        file.write_text(changed)
        assert Corpus([str(file)]).source != source


def test_a_stream_resumes_from_its_state(files):
    """A packed stream that was interrupted needs this."""
    stream = Corpus([str(files / "a.jsonl"), str(files / "c.jsonl.gz")]).stream()
    rows = iter(stream)
    taken = [next(rows) for _ in range(4)]
    state = stream.state_dict()
    again = Corpus([str(files / "a.jsonl"), str(files / "c.jsonl.gz")]).stream()
    again.load_state_dict(state)
    assert [row["text"] for row in [*taken, *again]] == TEXTS * 2


def test_a_dataset_in_a_folder_is_identified_by_its_files(files, tmp_path):
    (tmp_path / "set").mkdir()
    shutil.copy(files / "a.jsonl", tmp_path / "set")
    corpus = Corpus(dataset_name=str(tmp_path / "set"))
    assert list(corpus) == TEXTS
    (tmp_path / "set/a.jsonl").write_text((files / "a.jsonl").read_text().replace("fox", "fix"))
    changed = Corpus(dataset_name=str(tmp_path / "set"))
    assert list(changed) == ["one fix", *TEXTS[1:]] and changed.source != corpus.source
