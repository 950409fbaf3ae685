"""Shards: the tokenizer's own ids, restartable, checked, never half a file taken for a whole one."""

import errno
import itertools
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from conftest import SENTENCE
from datasets import Dataset

from neobert_hf.data import files, shard_reader
from neobert_hf.data import shards as shards_module
from neobert_hf.data.plans import write_packing_plan
from neobert_hf.data.shards import Shards, tokenize_corpus
from neobert_hf.data.wordpiece import train_wordpiece

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
    from neobert_hf.data.shards import tokenize_corpus
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
        with pytest.raises(OSError, match=r"shard-00005.arrow could not be written; the finished shards are whole"):
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


def test_lengths_of_documents_are_read_in_any_order(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer)
    wanted = np.array([len(document) for document in shards])
    numbers = np.random.default_rng(0).integers(0, 57, 100)
    assert np.array_equal(shards.lengths, wanted)
    assert np.array_equal(shards.lengths_of(numbers), wanted[numbers])
    assert shards.lengths_of(np.arange(0)).tolist() == []


def test_few_files_are_open_at_a_time_and_threads_share_them(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_reader, "MOST_OPEN", 2)
    write(tmp_path, tokenizer)
    shards, wanted = Shards(tmp_path), tokenizer(texts(57), truncation=True, max_length=32)["input_ids"]
    before = psutil.Process().num_fds()
    numbers = np.random.default_rng(0).permutation(np.arange(57).repeat(20)).tolist()
    with ThreadPoolExecutor(4) as pool:
        assert [document.tolist() for document in pool.map(shards.__getitem__, numbers)] == [wanted[n] for n in numbers]
    assert psutil.Process().num_fds() <= before + 2
    del shards
    assert psutil.Process().num_fds() <= before


def test_all_shards_of_a_process_share_the_limit_of_open_files(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_reader, "MOST_OPEN", 3)
    several = [write(tmp_path / str(number), tokenizer) for number in range(3)]
    before = psutil.Process().num_fds()
    for number in [*range(57)] * 2:
        assert several[0][number].tolist() == several[1][number].tolist() == several[2][number].tolist()
    assert psutil.Process().num_fds() <= before + 3


def test_the_number_of_open_files_is_half_of_the_limit_of_the_process(monkeypatch):
    for limit, wanted in ((256, 128), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024), (1, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert shard_reader._most_open() == wanted
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert shard_reader._most_open() == 128


@pytest.mark.parametrize("offsets_bytes", [0, 1 << 20])
def test_offsets_that_are_kept_and_offsets_that_are_read_again_give_the_same_documents(
    tokenizer, tmp_path, monkeypatch, offsets_bytes
):
    monkeypatch.setattr(shard_reader, "OFFSETS_BYTES", offsets_bytes * shard_reader.MOST_OPEN)
    shards, wanted = write(tmp_path, tokenizer), tokenizer(texts(57), truncation=True, max_length=32)["input_ids"]
    assert [shards[number].tolist() for number in [*range(57)] * 2] == wanted * 2


def test_an_open_shard_causes_no_message_at_the_end_of_the_interpreter(tokenizer, tmp_path):
    write(tmp_path, tokenizer)
    program = f"""
import os
from neobert_hf.data.shards import Shards
shards = Shards({str(tmp_path)!r})
shards[0]
os.close = None  # as modules that are still in use when the interpreter ends
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_plans_of_removed_shards_do_not_block_the_folder_and_are_removed(tokenizer, tmp_path):
    folder = tmp_path / "shards"
    plan = write_packing_plan(write(folder, tokenizer), 64, show_progress=False).folder

    def remove_shards():
        for file in folder.iterdir():
            if file.name != "plans":
                file.unlink()

    remove_shards()
    (folder / "plans/notes").mkdir()
    write(folder, tokenizer)
    assert plan.is_dir()  # the same shards again
    remove_shards()
    write(folder, tokenizer, texts(40))
    assert not plan.exists() and (folder / "plans/notes").is_dir()


def test_documents_are_read_where_files_have_no_pread(tokenizer, tmp_path, monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(shard_reader.os, "pread")
    wanted = tokenizer(texts(57), truncation=True, max_length=32)["input_ids"]
    assert [document.tolist() for document in write(tmp_path, tokenizer)] == wanted


@pytest.mark.parametrize("damage", ["offsets", "cut"])
def test_damage_that_appears_after_the_start_is_found_when_a_file_is_read(tokenizer, tmp_path, damage):
    shards = write(tmp_path, tokenizer)
    file = tmp_path / "shard-00003.arrow"
    content = bytearray(file.read_bytes())
    if damage == "offsets":
        place = bytes(content).index(np.cumsum([0, *shards.lengths[30:40]]).astype(np.int32).tobytes())
        content[place + 4 : place + 8] = content[place + 8 : place + 12]
        shards = Shards(tmp_path)
    else:
        assert len(shards[39])  # the file is open
        content = content[:400]
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00003\.arrow is damaged"):
        shards[39]
    assert len(shards[29]) == shards.lengths_of(np.array([29]))[0]


def test_as_many_documents_are_held_out_as_there_are_is_refused(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="num_held_out=57 of 57"):
        shards.split(57)


def test_shards_can_be_sent_to_another_process(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer)
    assert len(shards[0])  # a file is open
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


def fail_write(monkeypatch, number, code=errno.ENOSPC):
    """The write of this number fails as on a full disk, when its bytes go to the disk."""
    fsync, count = os.fsync, itertools.count(1)

    def sync(handle):
        if next(count) == number:
            raise OSError(code, os.strerror(code))
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", sync)


@pytest.mark.parametrize("number", range(1, 15))
def test_whichever_write_finds_the_disk_full_nothing_partial_stays_and_the_next_run_goes_on(
    tokenizer, tmp_path, monkeypatch, number
):
    wanted = tokenizer(texts(57), truncation=True, max_length=32)["input_ids"]
    message = "the disk is full: .* could not be written"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=message) as found:
        fail_write(patch, number)  # of settings, six shards, each with a record, and the manifest
        write(tmp_path, tokenizer, num_processes=1)
    assert found.value.errno == errno.ENOSPC and os.path.basename(found.value.filename) in found.value.strerror
    assert not list(tmp_path.glob("*.part")) and not (tmp_path / "manifest.json").exists()
    assert [document.tolist() for document in write(tmp_path, tokenizer, num_processes=1)] == wanted
    names = {file.name for file in tmp_path.iterdir() if not file.name.startswith(".")}
    assert names == {"manifest.json", *(f"shard-{i:05d}.arrow" for i in range(6))}


def tokenize_without_end(folder, tokenizer):
    write(folder, tokenizer, itertools.chain(texts(57), itertools.repeat(SENTENCE * 50)), documents_per_shard=500)


def wait_until(claim, seconds=20):
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def test_no_process_stays_when_the_one_that_started_them_is_killed(tokenizer, tmp_path):
    parent = multiprocessing.get_context("fork").Process(target=tokenize_without_end, args=(tmp_path, tokenizer))
    parent.start()
    wait_until(lambda: (tmp_path / "shard-00001.json").exists())
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) >= 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    wait_until(lambda: not [each for each in workers if each.is_running() and each.status() != psutil.STATUS_ZOMBIE])
    finished = len(list(tmp_path.glob("shard-*.json")))
    documents = [*texts(57), *[SENTENCE * 50] * (500 * finished - 57)]
    shards = write(tmp_path, tokenizer, documents, documents_per_shard=500)  # the lock that was left holds nobody
    assert len(shards) == 500 * finished and not list(tmp_path.glob("*.part"))


def test_a_process_that_is_killed_is_a_sentence_and_the_next_run_goes_on(tokenizer, tmp_path):
    before = set(psutil.Process().children())

    def killing():
        yield from texts(57)[:40]
        for child in set(psutil.Process().children()) - before:
            child.kill()
        yield from texts(57)[40:]

    with pytest.raises(RuntimeError, match=r"was ended from outside; finished shards are whole\. Run the same again"):
        write(tmp_path, tokenizer, killing())
    assert not list(tmp_path.glob("*.part"))
    wanted = tokenizer(texts(57), truncation=True, max_length=32)["input_ids"]
    assert [document.tolist() for document in write(tmp_path, tokenizer)] == wanted


def test_of_two_that_write_to_one_folder_the_second_is_refused_by_name(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    has_begun, may_end = threading.Event(), threading.Event()

    def slow():
        yield "the fox"
        has_begun.set()
        assert may_end.wait(10)

    first = threading.Thread(target=write, args=(tmp_path, tokenizer, slow()), kwargs={"num_processes": 1})
    first.start()
    assert has_begun.wait(10)
    with pytest.raises(ValueError, match=f"another process writes to {tmp_path}; wait until it has ended, or choose"):
        write(tmp_path, tokenizer, ["the fox"], num_processes=1)
    may_end.set()
    first.join()
    assert len(write(tmp_path, tokenizer, ["the fox"], num_processes=1)) == 1


def interrupt(tokenizer, folder):
    """Three finished shards of six."""

    def broken():
        yield from texts(57)[:30]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(folder, tokenizer, broken(), num_processes=1)
    assert len(list(folder.glob("shard-*.json"))) >= 2


def test_other_texts_are_never_put_behind_finished_shards(tokenizer, tmp_path):
    interrupt(tokenizer, tmp_path)
    changed = texts(57)
    changed[13] = changed[13][:-1] + "z"  # of the same size
    with pytest.raises(ValueError, match=r"shard-00001\.arrow was made of other texts than those at its place now"):
        write(tmp_path, tokenizer, changed)


@pytest.mark.parametrize("name", ["shard-00001.arrow", "shard-00001.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "zeros", "swap", "empty"])
def test_a_finished_shard_that_was_damaged_is_written_again(tokenizer, tmp_path, name, damage):
    interrupt(tokenizer, tmp_path)
    spoil(tmp_path / name, damage, (tmp_path / name).with_stem("shard-00000"))
    documents = [document.tolist() for document in write(tmp_path, tokenizer, num_processes=1)]
    assert documents == tokenizer(texts(57), truncation=True, max_length=32)["input_ids"]
    assert len(Shards(tmp_path, verify=True)) == 57


def spoil(file, damage, other):
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) * 2 // 3] ^= 1
    elif damage == "zeros":
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    elif damage == "swap":
        content = other.read_bytes()
    else:
        content = content[: len(content) // 2 if damage == "cut" else 0]
    file.write_bytes(content)


@pytest.mark.parametrize("damage", ["flip", "cut", "zeros", "empty", "list", "other"])
def test_a_damaged_manifest_is_named(tokenizer, tmp_path, damage):
    manifest = tmp_path / "manifest.json"
    write(tmp_path, tokenizer, num_processes=1)
    if damage in ("list", "other"):
        manifest.write_text('["ab"]' if damage == "list" else '{"shards": [{"file": "shard-00000.arrow"}]}')
    else:
        spoil(manifest, damage, None)
    with pytest.raises(ValueError, match=r"manifest\.json is (damaged|not a manifest of shards)"):
        Shards(tmp_path)


def test_every_digit_of_a_manifest_is_under_its_checksum(tokenizer, tmp_path):
    manifest = write(tmp_path, tokenizer, num_processes=1).manifest
    changed = json.loads((tmp_path / "manifest.json").read_text()) | {"num_tokens": manifest["num_tokens"] + 1}
    (tmp_path / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged \(its checksum is wrong\)"):
        Shards(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))  # as versions without checksums wrote it
    assert len(Shards(tmp_path)) == 57


def test_a_manifest_names_files_of_its_own_folder_only(tokenizer, tmp_path):
    manifest = write(tmp_path / "shards", tokenizer, num_processes=1).manifest
    (tmp_path / "shards/shard-00000.arrow").rename(tmp_path / "outside.arrow")
    manifest["shards"][0]["file"] = "../outside.arrow"
    (tmp_path / "shards/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"names '\.\./outside\.arrow', which is not a file of its own folder"):
        Shards(tmp_path / "shards")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_length": 0},
            "max_length=0 is not from 3, which is the tokenizer's special tokens and one more, to 2147",
        ),
        ({"max_length": 2, "long_documents": "chunk"}, "max_length=2 is not from 3"),
        ({"max_length": -1}, "max_length=-1 is not from 3"),
        ({"max_length": 1 << 31}, "max_length=2147483648 is not from 3"),
        ({"documents_per_shard": 0}, "documents_per_shard=0 is not from 1 to 1000000"),
        ({"documents_per_shard": 10**9}, "documents_per_shard=1000000000 is not from 1"),
        ({"num_processes": 0}, "num_processes=0 is not from 1 to"),
        ({"num_processes": 100_000}, "num_processes=100000 is not from 1 to .* cores"),
        ({"long_documents": "drop"}, "long_documents='drop' is not one of truncate, chunk"),
    ],
)
def test_arguments_out_of_bounds_are_refused_before_a_folder_is_made(tokenizer, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "shards", tokenizer, **changes)
    assert not (tmp_path / "shards").exists()


def test_three_tokens_leave_room_for_one(tokenizer, tmp_path):
    shards = write(tmp_path, tokenizer, ["the fox jumps"], max_length=3, long_documents="chunk", num_processes=1)
    words = [tokenizer.convert_ids_to_tokens(document.tolist()) for document in shards]
    assert words == [["[CLS]", word, "[SEP]"] for word in ("the", "fox", "jumps")]


@pytest.mark.parametrize("text", [["the fox", "a dog"], ("the fox", "a dog"), 0, None, b"the fox"])
def test_a_text_that_is_not_a_string_is_named(tokenizer, tmp_path, text):
    """The tokenizer would take two strings for a pair of sentences."""
    with pytest.raises(ValueError, match=rf"text 11 is .*a {type(text).__name__}; every text must be a string"):
        write(tmp_path, tokenizer, [*texts(11), text], num_processes=1)


def test_shards_of_a_version_that_knew_files_by_name_are_taken_with_a_word(tokenizer, tmp_path, caplog):
    source = {"files": [{"name": "a.txt", "bytes": 9, "sha256": "0" * 64}], "text_column": "text"}
    manifest = write(tmp_path, tokenizer, source=source, num_processes=1).manifest
    del manifest["source"]["files"][0]["sha256"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with caplog.at_level("WARNING", logger="neobert_hf.data.shards"):
        assert len(write(tmp_path, tokenizer, source=source)) == 57
    assert "a later change of the content cannot be detected" in caplog.text
    source["files"][0]["bytes"] = 8
    with pytest.raises(ValueError, match="shards of something else: source is"):
        write(tmp_path, tokenizer, source=source)


def test_a_slow_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="object is not a fast tokenizer"):
        write(tmp_path / "shards", object())
