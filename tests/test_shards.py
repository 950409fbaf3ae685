"""Shards: the tokenizer's own ids, restartable, checked, never half a file taken for a whole one."""

import itertools
import json
import pickle
import random
import resource
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from conftest import SENTENCE
from datasets import Dataset

from neobert_hf import shards as shards_module
from neobert_hf.shards import Shards, tokenize_corpus
from neobert_hf.wordpiece import train_wordpiece

WORDS = SENTENCE.split()


def texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(count)]


def write(folder, tokenizer, documents=None, **changes):
    options = dict(documents_per_shard=10, num_processes=2, show_progress=False, max_length=32) | changes
    return tokenize_corpus(texts(57) if documents is None else documents, tokenizer, folder, **options)


def test_documents_have_the_ids_that_the_tokenizer_gives(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer)
    wanted = tokenizer(texts(57), truncation=True, max_length=32)["input_ids"]
    assert [document.tolist() for document in shards] == wanted
    assert shards.lengths.tolist() == list(map(len, wanted))
    manifest = shards.manifest
    assert (manifest["num_documents"], manifest["num_tokens"]) == (57, sum(map(len, wanted)))
    counts = {16: sum(len(w) <= 16 for w in wanted), 32: sum(len(w) > 16 for w in wanted)}
    assert manifest["length_histogram"] == {str(top): count for top, count in counts.items()}


def test_long_documents_are_chunked_without_losing_a_token(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer, long_documents="chunk", max_length=12)
    special = set(tokenizer.all_special_ids)
    assert shards.lengths.max() == 12
    assert all(document[0] == tokenizer.cls_token_id and document[-1] == tokenizer.sep_token_id for document in shards)
    found = [token for document in shards for token in document.tolist() if token not in special]
    assert found == [token for ids in tokenizer(texts(57))["input_ids"] for token in ids if token not in special]


def test_texts_without_a_token_are_counted_and_left_out(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer, ["the fox", "", "   \n", "a dog"])
    assert len(shards) == 2 and shards.manifest["num_empty"] == 2
    with pytest.raises(ValueError, match="no text of the corpus has a token"):
        write(tmp_path / "nothing", tokenizer, ["", " "])


def test_a_lone_surrogate_does_not_stop_a_corpus(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer, ["the fox", "a \ud800 dog"])
    assert len(shards) == 2


def test_the_datasets_library_reads_a_shard(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer)
    rows = Dataset.from_file(str(tmp_path / "shard-00002.arrow"))
    assert rows[3]["input_ids"] == shards[23].tolist()


def test_an_interrupted_run_goes_on_after_its_whole_shards(tokenizer, tmp_path):
    class Interrupted(Exception):
        pass

    def broken():
        yield from texts(57)[:35]
        raise Interrupted

    with pytest.raises(Interrupted):
        write(tmp_path, tokenizer, broken())
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json; tokenize into it first"):
        Shards(tmp_path)
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*.arrow")}
    assert len(finished) == 3
    shards = write(tmp_path, tokenizer)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert [d.tolist() for d in shards] == tokenizer(texts(57), truncation=True, max_length=32)["input_ids"]
    assert write(tmp_path, tokenizer, itertools.repeat("never read")).manifest == shards.manifest


def test_a_shard_without_its_record_is_written_again(tokenizer, tmp_path):
    """What a process killed between the two writes leaves behind, and a file that was cut."""
    write(tmp_path, tokenizer)
    wanted = [document.tolist() for document in Shards(tmp_path)]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").unlink()
    names = ("source", "tokenizer", "max_length", "long_documents", "documents_per_shard")
    (tmp_path / "settings.json").write_text(json.dumps({name: manifest[name] for name in names}))
    (tmp_path / "shard-00001.part").write_bytes(b"half")
    (tmp_path / "shard-00002.arrow").write_bytes(b"cut")
    assert [document.tolist() for document in write(tmp_path, tokenizer)] == wanted


@pytest.mark.parametrize("changes", [{"max_length": 16}, {"long_documents": "chunk"}, {"source": {"other": 1}}])
def test_shards_of_something_else_are_not_continued(tokenizer, tmp_path, changes):
    write(tmp_path, tokenizer)
    with pytest.raises(ValueError, match=f"shards of something else: {next(iter(changes))} is"):
        write(tmp_path, tokenizer, **changes)


def test_a_folder_of_other_files_is_left_alone(tokenizer, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="not empty and holds no shards"):
        write(tmp_path, tokenizer)


def test_damage_is_found(tokenizer, tmp_path):
    write(tmp_path, tokenizer)
    file = tmp_path / "shard-00003.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00003\.arrow is damaged"):
        Shards(tmp_path, verify=True)
    file.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"shard-00003\.arrow is damaged"):
        Shards(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"shard-00003\.arrow is missing"):
        Shards(tmp_path)


def test_a_script_without_a_guard_is_told_what_to_do(tokenizer, tmp_path):
    """Where processes are started anew, as on macOS and Windows, each of them runs the script from its beginning."""
    tokenizer.save_pretrained(tmp_path)
    program = """
    import multiprocessing, sys
    multiprocessing.set_start_method("spawn", force=True)
    from transformers import PreTrainedTokenizerFast
    from neobert_hf.shards import tokenize_corpus
    tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
    for num_processes in (1, 2):
        shards = tokenize_corpus(["the fox"] * 9, tokenizer, f"{sys.argv[1]}/{num_processes}", num_processes=num_processes)
        print(len(shards), "documents by", num_processes)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.stdout.startswith("9 documents by 1") and "by 2" not in done.stdout
    assert done.returncode == 1
    assert "RuntimeError: a process that tokenizes could not start" in done.stderr.splitlines()[-1], done.stderr
    assert "pass num_processes=1" in done.stderr


def test_one_process_is_this_one_and_writes_the_same(tokenizer, tmp_path, monkeypatch):
    wanted = write(tmp_path / "two", tokenizer)
    monkeypatch.setattr(shards_module, "ProcessPoolExecutor", None)
    alone = write(tmp_path / "one", tokenizer, num_processes=1)
    assert alone.manifest == wanted.manifest


def test_there_are_as_many_processes_as_cores_to_use_and_61_at_most_on_windows(tokenizer, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(shards_module, "_write_shards", lambda *args: asked.append(args[2]) or 1 / 0)
    monkeypatch.setattr(shards_module.os, "cpu_count", lambda: 128)

    def ask():
        with pytest.raises(ZeroDivisionError):
            write(tmp_path, tokenizer, num_processes=None)

    monkeypatch.setattr(shards_module.os, "sched_getaffinity", lambda process: {3, 5, 8}, raising=False)
    ask()
    monkeypatch.delattr(shards_module.os, "sched_getaffinity")  # as on macOS and Windows
    ask()
    monkeypatch.setattr(shards_module.sys, "platform", "win32")
    ask()
    assert asked == [3, 128, 61]


def test_a_full_disk_leaves_whole_shards_and_an_error(tokenizer, tmp_path):
    """A limit on the size of files stands for a full disk: writing fails in the middle in the same way."""
    documents = texts(40) + ["the fox"] * 10 + [" ".join(WORDS * 1000)] * 10
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(OSError, match=r"shard 5 could not be written.*the finished ones are whole"):
            write(tmp_path, tokenizer, documents, max_length=10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*.part")) and not (tmp_path / "manifest.json").exists()
    assert {path.name for path in tmp_path.glob("shard-*.arrow")} >= {f"shard-{i:05d}.arrow" for i in range(4)}


def test_another_tokenizer_is_refused(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer)
    shards.check_tokenizer(tokenizer)
    tokenizer(["the fox"], truncation=True, max_length=7)  # leaves a truncation behind, which changes no id
    shards.check_tokenizer(tokenizer)
    other = train_wordpiece(["some other words to learn"] * 20, vocab_size=64)
    with pytest.raises(ValueError, match="come from another tokenizer"):
        shards.check_tokenizer(other)


def test_views_hold_the_longer_documents_and_copy_nothing(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer)
    view = shards.longer_than(20)
    assert [d.tolist() for d in view] == [d.tolist() for d in shards if len(d) > 20]
    assert np.shares_memory(view[0], shards[int(view.numbers[0])])
    assert [d.tolist() for d in view.longer_than(30)] == [d.tolist() for d in shards if len(d) > 30]


def test_a_split_holds_every_document_once(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer)
    training, held_out = shards.split(9, seed=3)
    assert sorted([*training.numbers, *held_out.numbers]) == list(range(57)) and len(held_out) == 9
    assert [d.tolist() for d in shards.split(9, seed=3)[1]] == [d.tolist() for d in held_out]
    with pytest.raises(ValueError, match="num_held_out=57 of 57"):
        shards.split(57)


def test_shards_can_be_sent_to_another_process(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer)
    again = pickle.loads(pickle.dumps(shards.longer_than(20)))
    assert [d.tolist() for d in again] == [d.tolist() for d in shards.longer_than(20)]


def test_memory_does_not_grow_with_the_corpus(tokenizer, tmp_path, monkeypatch):
    """No more texts are read ahead than the processes can work on."""
    read = 0

    def counted():
        nonlocal read
        for text in texts(400):
            read += 1
            yield text

    most_ahead, collect = 0, shards_module._collect

    def watched(pending, records, progress):
        nonlocal most_ahead
        pending = collect(pending, records, progress)
        most_ahead = max(most_ahead, read - sum(record["texts"] for record in records.values()))
        return pending

    monkeypatch.setattr(shards_module, "_collect", watched)
    write(tmp_path, tokenizer, counted())
    assert 0 < most_ahead <= 3 * 10
