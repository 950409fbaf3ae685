"""Reading text: every kind of file, and an error that names what is wrong with it."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neobert_hf.corpus import Corpus

TEXTS = ["one fox", "two dogs\nand a cat", "three"]


@pytest.fixture
def files(tmp_path):
    lines = "".join(json.dumps({"text": text, "number": i}) + "\n" for i, text in enumerate(TEXTS))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.txt").write_text("\n\n".join(TEXTS))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "d.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "b.txt", "c.jsonl.gz", "d.parquet"])
def test_every_kind_of_file_gives_its_documents_each_time(files, name):
    corpus = Corpus([str(files / name)])
    assert list(corpus) == TEXTS
    assert list(corpus) == TEXTS
    assert corpus.source["files"][0]["bytes"] == (files / name).stat().st_size


def test_a_text_file_can_be_read_by_lines_or_whole(files):
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
        ("empty.txt", b"", r"empty\.txt is empty; leave it out"),
        ("binary.txt", b"abc\0def", r"binary\.txt is binary"),
        ("latin.txt", "caf\u00e9 und weiter".encode("latin-1"), r"latin\.txt is not UTF-8 at byte 3"),
        ("strange.doc", b"abc", r"strange\.doc is of no known kind; choose \.txt"),
    ],
)
def test_a_file_that_is_not_text_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Corpus([str(tmp_path / name)])


def test_what_cannot_be_read_as_one_corpus_is_refused(files):
    with pytest.raises(ValueError, match="files of 2 kinds"):
        Corpus([str(files / "a.jsonl"), str(files / "b.txt")])
    with pytest.raises(ValueError, match=r"text_column='content' is not a column of .* it has number, text"):
        Corpus([str(files / "a.jsonl")], text_column="content")
    with pytest.raises(FileNotFoundError, match=r"no\.txt is not a file"):
        Corpus([str(files / "no.txt")])
    with pytest.raises(ValueError, match="give exactly one of them"):
        Corpus([str(files / "a.jsonl")], dataset_name="some/thing")
