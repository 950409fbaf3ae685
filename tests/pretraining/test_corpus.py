"""`Corpus`: the same texts on every pass, an identity that follows the content, and streams that resume and divide."""

import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neobert_hf.pretraining import corpus as corpus_module
from neobert_hf.pretraining.arguments import CorpusArguments
from neobert_hf.pretraining.corpus import Corpus

TEXTS = ["one fox", "two dogs\nand a cat", "three", "", "five"]


@pytest.fixture
def files(tmp_path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("six\n\nseven")
    return [str(tmp_path / "a.parquet"), str(tmp_path / "b.txt")]


def test_texts_are_the_same_on_every_pass_and_parts_divide_each_file(files):
    corpus, wanted = Corpus(files), [*TEXTS, "six\n", "seven"]
    assert list(corpus) == list(corpus) == wanted
    stream = corpus.stream(num_parts=3)
    assert stream.num_shards == 6
    shares = [[row["text"] for row in stream.shard(num_shards=4, index=index)] for index in range(4)]
    assert sorted(text for share in shares for text in share) == sorted(wanted)
    assert shares[0][:2] == [TEXTS[0], TEXTS[3]]


def test_a_dataset_in_a_folder_is_identified_by_its_files_and_its_texts_are_checked(files, tmp_path):
    (tmp_path / "set").mkdir()
    shutil.copy(files[0], tmp_path / "set")
    corpus = Corpus(dataset_name=str(tmp_path / "set"))
    source = corpus.source
    assert list(corpus) == TEXTS
    pq.write_table(pa.table({"text": ["other", *TEXTS[1:]]}), tmp_path / "set/a.parquet")
    assert Corpus(dataset_name=str(tmp_path / "set")).source != source
    pq.write_table(pa.table({"text": [[1], [2]]}), tmp_path / "set/a.parquet")
    with pytest.raises(ValueError, match=r"set, row 1: text is \[1\], a list; every text must be a string"):
        list(Corpus(dataset_name=str(tmp_path / "set")))
    with pytest.raises(ValueError, match=r"text_column='body' is not a column of .*set; it has text"):
        Corpus(dataset_name=str(tmp_path / "set"), text_column="body").stream()


def test_a_single_path_is_one_file(files):
    for path in (files[0], str(files[0])):
        assert list(Corpus(path)) == list(Corpus([files[0]]))
        data = CorpusArguments(path, validation_files=path)
        assert data.train_files == data.validation_files == [str(files[0])]


def test_sources_that_are_none_are_refused(files, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file or folder: .*no\.txt'"):
        Corpus([*files, str(tmp_path / "no.txt")])
    for arguments in ({"files": files, "dataset_name": "some/thing"}, {}, {"files": []}):
        with pytest.raises(ValueError, match="give exactly one of them"):
            Corpus(**arguments)
    with pytest.raises(ValueError, match="sample_by='word' is not one of line, paragraph, document"):
        Corpus(files, sample_by="word")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt holds no document"):
        list(Corpus([str(tmp_path / "empty.txt")]))


@pytest.mark.parametrize("num_samples", [100, 10])
def test_the_source_depends_on_the_content_and_not_on_folder_or_time_of_a_file(tmp_path, monkeypatch, num_samples):
    """The whole content is hashed, or ten samples of 30 bytes if it exceeds the limit."""
    monkeypatch.setattr(corpus_module, "NUM_SAMPLES", num_samples)
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
    changes += [content[:451] + "X" + content[452:]] if num_samples > 30 else []
    for changed in changes:
        assert len(changed) == len(content)
        file.write_text(changed)
        assert Corpus([str(file)]).source != source


def test_files_that_together_are_within_the_limit_are_hashed_as_a_whole(tmp_path, monkeypatch):
    """One of them has more than half of the content."""
    monkeypatch.setattr(corpus_module, "NUM_SAMPLES", 12)
    monkeypatch.setattr(corpus_module, "SAMPLE_BYTES", 10)
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("x" * 100)
    short.write_text("x" * 20)
    sources = []
    for place in range(100):
        long.write_text("x" * place + "y" + "x" * (99 - place))
        sources.append(str(Corpus([long, short]).source))
    assert len(set(sources)) == 100
