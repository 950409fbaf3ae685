"""`neobert embed`: what other libraries read in its output, what it embeds again, and what it refuses."""

import json
import random
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import largest_file, run_main
from sentence_transformers import SentenceTransformer

import neobert_hf
from neobert_cli import commands as neobert_cli
from neobert_hf.data import read_text_column
from neobert_hf.embeddings import DocumentSearch, embed_files, kept, vector_files


def run(*arguments):
    return run_main(neobert_cli, *arguments)


@pytest.mark.parametrize("has_bf16", ["0", "1"])
def test_the_library_chooses_the_dtype_of_bf16_weights_and_keeps_other_dtypes(folder, monkeypatch, has_bf16):
    monkeypatch.setenv("NEOBERT_CPU_BF16", has_bf16)
    expected = torch.bfloat16 if has_bf16 == "1" else torch.float32
    assert vector_files.open_for_inference(neobert_hf.MINI_MODEL_PATH).dtype == expected
    assert vector_files.open_for_inference(folder).dtype == torch.float32


def read_npy(file):
    return None, np.load(file)


def read_jsonl(file):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["text"] for row in rows], np.array([row["embedding"] for row in rows], np.float32)


def read_parquet(file):
    import pandas

    rows = pandas.read_parquet(file)
    return list(rows["text"]), np.stack(rows["embedding"])


TEXTS = ["the quick, brown fox", "", 'the "old" sea']


@pytest.mark.parametrize("read", [read_npy, read_jsonl, read_parquet])
@pytest.mark.parametrize("ending", ["txt", "jsonl", "csv"])
def test_embed_writes_a_vector_for_each_text_of_a_file(folder, tmp_path, ending, read):
    """Other libraries read the file: the texts in their order, and the vectors of SentenceTransformer."""
    source, output = tmp_path / f"a.{ending}", tmp_path / f"out.{read.__name__.removeprefix('read_')}"
    quoted = [f'"{text.replace(chr(34), chr(34) * 2)}"' for text in TEXTS]
    content = {"txt": TEXTS, "jsonl": [json.dumps({"body": text}) for text in TEXTS], "csv": ["body", *quoted]}
    source.write_text("\n".join(content[ending]))
    columns = () if ending == "txt" else ("--text_column", "body", "--normalize")
    result = json.loads(run("embed", source, *columns, "-o", output, "--model", folder))
    texts, vectors = read(output)
    expected = SentenceTransformer(folder).encode(TEXTS, normalize_embeddings=bool(columns))
    assert texts in (None, TEXTS) and vectors.dtype == expected.dtype
    np.testing.assert_allclose(vectors, expected, atol=1e-6)  # float32; batches of one order
    assert (result["texts"], result["dimension"]) == vectors.shape


def test_a_single_path_is_one_file_or_folder(folder, tmp_path):
    source = tmp_path / "texts/a.txt"
    source.parent.mkdir()
    source.write_text("\n".join(TEXTS))
    for path in (str(source), source.parent):
        assert embed_files(path, str(tmp_path / "out.npy"), folder, overwrite=True)["texts"] == 3
        assert len(DocumentSearch(path, folder, cache=tmp_path / "cache").passages) == 1
    assert len(read_text_column(source, "text")) == 3


def test_embed_counts_the_texts_that_are_longer_than_the_model_reads(folder, tmp_path, caplog):
    model = SentenceTransformer(folder)
    model.max_seq_length = 6
    model.save_pretrained(str(tmp_path / "short"))
    (tmp_path / "texts.txt").write_text("the fox\nthe quick brown fox\nthe quick brown fox jumps\n.....\n")
    result = run("embed", tmp_path / "texts.txt", "-o", tmp_path / "a.npy", "--model", tmp_path / "short")
    result = json.loads(result.splitlines()[-1])
    assert (result["texts"], result["max_seq_length"], result["truncated"]) == (4, 6, 2)
    fact = "2 of 4 texts are truncated to 6 tokens, and 2 tokens are lost; split long texts"
    embed = (str(tmp_path / "texts.txt"), str(tmp_path / "b.npy"), str(tmp_path / "short"))
    assert embed_files(*embed, truncation="off") == result | {"output": embed[1]} and caplog.messages == [fact]
    with pytest.raises(ValueError, match=f"^{fact}, or choose warn as truncation"):
        embed_files(embed[0], str(tmp_path / "c.npy"), embed[2], truncation="error")
    assert not list(tmp_path.glob("c.npy*"))


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_interrupted_embed_embeds_only_what_is_missing(folder, tmp_path, monkeypatch, is_killed):
    """The output equals that of an uninterrupted command, and nothing else remains. A kill leaves what is on the disk then."""
    texts = [f"the fox {number}" for number in range(10)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    embed = ("embed", tmp_path / "a.txt", "--model", folder, "--normalize", "-o", tmp_path / "out/a.npy")
    encode, embedded = SentenceTransformer.encode, []

    def interrupted(self, block, **options):
        if len(embedded) == 6:
            if is_killed:
                shutil.copy(tmp_path / "out/a.npy.vectors", tmp_path / "left")
            raise KeyboardInterrupt
        embedded.extend(block)
        return encode(self, block, **options)

    monkeypatch.setattr(kept, "BLOCK", 3)
    monkeypatch.setattr(kept, "SAVE_SECONDS", -1)
    monkeypatch.setattr(SentenceTransformer, "encode", interrupted)
    with pytest.raises(SystemExit, match="130"):
        run(*embed)
    assert embedded == texts[:6] and [file.name for file in (tmp_path / "out").iterdir()] == ["a.npy.vectors"]
    if is_killed:
        shutil.copy(tmp_path / "left", tmp_path / "out/a.npy.vectors")
    embedded.clear()
    run(*embed)
    assert embedded == texts[6:]
    monkeypatch.setattr(SentenceTransformer, "encode", encode)
    expected = SentenceTransformer(folder).encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(np.load(tmp_path / "out/a.npy"), expected, atol=1e-6)  # float32, other batches
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["a.npy"]


def test_kept_vectors_that_are_damaged_or_of_other_texts_are_not_used(folder, tmp_path, monkeypatch, caplog):
    (tmp_path / "a.txt").write_text("the fox\nthe quick dog\n")
    embed = ("embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / "out.npy")
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(vector_files, "writing", Mock(side_effect=KeyboardInterrupt))
        run(*embed)
    vectors = tmp_path / "out.npy.vectors"
    vectors.write_bytes(vectors.read_bytes()[:-8] + bytes(8))
    (tmp_path / "a.txt").write_text("the old sea\nthe fox\n")
    with pytest.raises(SystemExit, match=r"out\.npy\.vectors exists; name another file, or give overwrite"):
        run(*embed)
    run(*embed, "--overwrite")
    expected = SentenceTransformer(folder).encode(["the old sea", "the fox"])
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)  # float32
    assert [line.startswith(f"{vectors} is not used") for line in caplog.messages] == [True, True]


def test_embed_reads_folders_and_patterns_and_truncates_at_the_given_length(folder, tmp_path):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    for name, text in {"b.txt": "the fox\n", "sub/a.csv": "text\nold sea\n", "c.jsonl": '{"text": "warm"}\n'}.items():
        (data / name).write_text(text)
    (data / "notes.md").write_text("no texts in lines")
    cases = ((data,), ["the fox", "warm", "old sea"]), ((data / "*.txt", data / "sub"), ["the fox", "old sea"])
    for words, expected in cases:
        run("embed", *words, "-o", tmp_path / "out.jsonl", "--model", folder, "--overwrite")
        assert read_jsonl(tmp_path / "out.jsonl")[0] == expected
    (tmp_path / "long.txt").write_text("the quick brown fox jumps\nthe quick lazy dog\n")
    vectors = []
    for length in (4, 64):  # [CLS] the quick [SEP]
        options = ("--model", folder, "--max_length", length, "--overwrite")
        result = run("embed", tmp_path / "long.txt", "-o", tmp_path / "a.npy", *options)
        vectors.append(np.load(tmp_path / "a.npy"))
        assert json.loads(result)["truncated"] == (2 if length == 4 else 0)
    (short, other), (long, _) = vectors
    assert np.array_equal(short, other) and not np.allclose(short, long)


def test_embed_refuses_models_and_outputs_that_it_cannot_use(folder, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (rows := tmp_path / "a.jsonl").write_text('{"text": "a", "id": 1}\n')
    for name in ("folder.npy", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.npy").write_text("years of work")
    (tmp_path / "b.npy.vectors").write_text("years of work")
    text, model, output = ("embed", tmp_path / "a.txt"), ("--model", folder), ("-o", tmp_path / "out.npy")
    for command, message in [
        ((*text, *model, *output, "--prompt_name", "nope"), "Prompt name 'nope' not found"),
        (("embed", tmp_path / "notes", *model, *output), r"^neobert embed: .*notes: no file ends in \.txt, \.jsonl"),
        ((*text, *model, *output, "--max_length", "2"), "max_length=2 leaves no token beside"),
        (("embed", tmp_path / "no.txt", *model, *output), "^neobert embed: .*No such file or folder: '.*no.txt'$"),
        (("embed", tmp_path / "*.csv", *model, *output), r"^neobert embed: .*No such file or folder: '.*\*.csv'$"),
        ((*text, *model, "-o", tmp_path / "a.txt/out.npy"), r"embed: File exists: '.*a\.txt'$"),
        ((*text, *model, "-o", tmp_path / "folder.npy"), "folder.npy exists; name another file"),
        ((*text, *model, "-o", tmp_path / "mine.npy"), "mine.npy exists; name another file, or give overwrite"),
        ((*text, *model, "-o", tmp_path / "b.npy"), "b.npy.vectors exists; name another file"),
        ((*text, *model, "-o", tmp_path / "a.bin"), r"a\.bin ends in none of \.npy, \.jsonl, \.parquet; choose one"),
        ((*text, *output, "--model", tmp_path / "no"), r"/no is no folder; give an existing folder, or an id"),
        (("embed", rows, *model, "-o", tmp_path / ".." / tmp_path.name / "a.jsonl"), "is also an input"),
    ]:
        with pytest.raises(SystemExit, match=message):
            run(*command)
        assert not (tmp_path / "out.npy").exists()
    assert (tmp_path / "a.jsonl").read_text() == '{"text": "a", "id": 1}\n'
    assert (tmp_path / "mine.npy").read_text() == (tmp_path / "b.npy.vectors").read_text() == "years of work"


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl", "out.parquet"])
def test_a_full_disk_leaves_the_earlier_file_and_the_vectors_and_no_partial_output(folder, tmp_path, monkeypatch, name):
    """A limit on the size of files simulates a full disk: first while texts are embedded, then while the output is written."""
    words = random.Random(0).choices(["the", "quick", "brown", "fox", "old", "sea"], k=8000)
    # rows that do not compress
    (tmp_path / "a.txt").write_text("".join(f"{' '.join(words[i : i + 8])}\n" for i in range(0, 8000, 8)))
    embed = ("embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / name, "--overwrite")
    (tmp_path / name).write_text("earlier")
    with largest_file(30_000), pytest.raises(SystemExit, match=rf"{name}.vectors cannot be written \(.*File too large"):
        run(*embed)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(vector_files, "writing", Mock(side_effect=KeyboardInterrupt))
        run(*embed)
    with largest_file(30_000), pytest.raises(SystemExit, match=rf"{name} cannot be written \(.*File too large"):
        run(*embed)
    assert (tmp_path / name).read_text() == "earlier" and not list(tmp_path.glob("*.part"))
    with monkeypatch.context() as patch:
        patch.setattr(SentenceTransformer, "encode", Mock(side_effect=AssertionError("a text is embedded again")))
        run(*embed)
    assert {file.name for file in tmp_path.iterdir()} == {"a.txt", name}
