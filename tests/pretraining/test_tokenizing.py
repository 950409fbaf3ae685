"""Tokenizing: the tokenizer's own ids, the same bytes after a kill and for any number of processes, and nothing left out."""

import gzip
import hashlib
import json
import multiprocessing
import os
import random
import signal
import time

import psutil
import pytest
from conftest import SENTENCE, largest_file, packed_rows, run_main, unpack
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from neobert_cli import commands as neobert_cli
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.pretraining import tokenizing
from neobert_hf.pretraining.corpus import Corpus
from neobert_hf.pretraining.documents import Documents, task_files
from neobert_hf.pretraining.tokenizing import tokenize

WORDS = SENTENCE.split()


def texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(count)]


def jsonl(file, rows):
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def corpus(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(25, seed=1))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return Corpus([jsonl(tmp_path / "a.jsonl", texts(32)), str(tmp_path / "b.jsonl.gz")])


def wanted(corpus, tokenizer):
    return sorted(tokenizer(list(corpus))["input_ids"])


def found(documents):
    return sorted(document.tolist() for document in documents)


def content(folder):
    """Hashes of everything that was written but the logs."""
    files = [file for name in ("ids/*", "records/*", "*.json") for file in folder.glob(name)]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("tasks", [None, 1, 5])
def test_documents_are_whole_and_have_the_ids_that_the_tokenizer_gives(tokenizer, corpus, tmp_path, tasks):
    documents = tokenize(corpus, tokenizer, tmp_path / "out", tasks=tasks, workers=1)
    ids = wanted(corpus, tokenizer)
    assert found(documents) == ids and documents.special_tokens == (1, 1)
    manifest = documents.manifest
    assert (manifest["num_documents"], manifest["num_tokens"]) == (57, sum(map(len, ids)))
    assert manifest["num_tasks"] == (tasks or 8)
    documents.check_tokenizer(tokenizer)


@pytest.mark.parametrize("long_documents", ["truncate", "chunk"])
def test_rows_cut_documents_as_the_tokenizer_truncates_and_overflows(tokenizer, corpus, tmp_path, long_documents):
    documents = tokenize(corpus, tokenizer, tmp_path / "out", workers=1)
    options = dict(special_tokens=documents.special_tokens, long_documents=long_documents)
    rows = packed_rows(documents, 64, max_length=12, **options)
    overflow = long_documents == "chunk"
    encoded = tokenizer(list(corpus), truncation=True, max_length=12, return_overflowing_tokens=overflow)
    assert sorted(unpack(rows)) == sorted(encoded["input_ids"])


def test_the_number_of_processes_changes_no_byte_and_a_handler_of_sigterm_stays(tokenizer, corpus, tmp_path):
    """Processes that inherited such a handler would never end."""
    before, handler = signal.getsignal(signal.SIGTERM), lambda *_: None
    signal.signal(signal.SIGTERM, handler)
    for workers in (1, 3):
        tokenize(corpus, tokenizer, tmp_path / str(workers), workers=workers)
    assert signal.signal(signal.SIGTERM, before) is handler
    assert content(tmp_path / "1") == content(tmp_path / "3")


def test_texts_without_a_token_are_not_packed_and_a_lone_surrogate_does_not_stop_a_corpus(tokenizer, tmp_path):
    empty = ["\u200b", "\ufeff", "\0"]  # `isspace` is False, and the tokenizer normalizes them to nothing
    rows = ["the fox", "", "   \n", None, *empty, "a \ud800 dog"]
    documents = tokenize(Corpus([jsonl(tmp_path / "a.jsonl", rows)]), tokenizer, tmp_path / "out", workers=1)
    texts = tokenizer(["the fox", "a ? dog"])["input_ids"]
    assert found(documents) == sorted(texts + tokenizer(empty)["input_ids"])
    assert sorted(documents.longer_than(0).lengths.tolist()) == [0] * len(empty) + sorted(map(len, texts))
    with pytest.raises(ValueError, match="has a token; there is nothing to train on"):
        tokenize(Corpus([jsonl(tmp_path / "b.jsonl", ["", " ", *empty])]), tokenizer, tmp_path / "none", workers=1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ["the fox", "a dog"]}', "text is .*, a list; every text must be a string"),
        ('{"text": "the fo', "this is not JSON"),
        ('{"text": "caf\xe9"}', "is not UTF-8"),
    ],
)
def test_a_damaged_line_is_refused_with_file_and_line_and_not_left_out(tokenizer, tmp_path, workers, line, message):
    file = jsonl(tmp_path / "a.jsonl", texts(11))
    with open(file, "ab") as handle:
        handle.write(line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=f"{file}, line 12.* {message}"):
        tokenize(Corpus([file]), tokenizer, tmp_path / "out", workers=workers)
    assert not (tmp_path / "out/manifest.json").exists()


def interrupt(corpus, tokenizer, folder, number=3):
    class Interrupted(Exception):
        pass

    write_record = tokenizing.write_record

    def broken(folder, task, token_size):
        if task == number:
            raise Interrupted
        write_record(folder, task, token_size)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(tokenizing, "write_record", broken)
        tokenize(corpus, tokenizer, folder, workers=1)


@pytest.mark.parametrize("record", [None, "{}", "[]", "{"])
def test_a_run_continues_after_its_whole_tasks_and_a_finished_one_reads_no_text(
    tokenizer, corpus, tmp_path, monkeypatch, record
):
    tokenize(corpus, tokenizer, tmp_path / "whole", workers=1)
    out = tmp_path / "out"
    interrupt(corpus, tokenizer, out)
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json; tokenize into it first"):
        Documents(out)
    finished = [task_files(out, task)["ids"] for task in range(3)]
    if record is None:
        os.truncate(finished[2], 10)  # by a power failure
    else:
        (out / "records/00002.json").write_text(record)
    (out / "00003.abc.part").mkdir()  # of a process that was killed
    times = [file.stat().st_mtime_ns for file in finished]
    tokenize(corpus, tokenizer, out, workers=2)
    assert [file.stat().st_mtime_ns for file in finished[:2]] == times[:2]
    assert content(out) == content(tmp_path / "whole") and not list(out.glob("*.part"))
    monkeypatch.setattr(tokenizing, "read_task", None)
    assert len(tokenize(corpus, tokenizer, out)) == 57


def test_another_corpus_tokenizer_or_number_of_tasks_is_refused_in_a_folder_that_was_begun(tokenizer, corpus, tmp_path):
    other = train_wordpiece(["some other words to learn"] * 20, vocab_size=64)
    interrupt(corpus, tokenizer, tmp_path / "begun")
    tokenize(corpus, tokenizer, tmp_path / "finished", workers=1)
    changed = texts(32)
    changed[13] = changed[13][:-1] + "z"  # of the same size
    for folder in (tmp_path / "begun", tmp_path / "finished"):
        with pytest.raises(ValueError, match=r"something else: tokenizer\.sha256 was"):
            tokenize(corpus, other, folder)
        with pytest.raises(ValueError, match="holds documents of something else: num_tasks was 8 and is 5"):
            tokenize(corpus, tokenizer, folder, tasks=5)
    jsonl(tmp_path / "a.jsonl", changed)
    for folder in (tmp_path / "begun", tmp_path / "finished"):
        with pytest.raises(ValueError, match=r"something else: source\.files was"):
            tokenize(Corpus(corpus.files), tokenizer, folder)
    with pytest.raises(ValueError, match="come from another tokenizer"):
        Documents(tmp_path / "finished").check_tokenizer(other)


def test_settings_of_the_tokenizer_that_change_no_id_are_no_other_tokenizer(tokenizer, corpus, tmp_path):
    tokenizer(["the fox"], truncation=True, max_length=7)  # leaves a truncation behind
    documents = tokenize(corpus, tokenizer, tmp_path / "out", workers=1)
    documents.check_tokenizer(tokenizer)
    assert found(documents) == wanted(corpus, tokenizer)


def test_a_folder_of_other_files_is_left_alone(tokenizer, corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match=r"holds letter\.txt; choose a new or empty folder"):
        tokenize(corpus, tokenizer, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["letter.txt"]


def test_special_tokens_are_counted_without_the_letter_a_and_without_an_unknown_token(tmp_path):
    plain = Tokenizer(models.BPE({"C": 0, "G": 1, "[CLS]": 2, "[SEP]": 3}, []))
    plain.post_processor = TemplateProcessing("[CLS] $A [SEP] [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    corpus = Corpus([jsonl(tmp_path / "a.jsonl", ["CG"])])
    documents = tokenize(corpus, PreTrainedTokenizerFast(tokenizer_object=plain), tmp_path / "out", workers=1)
    assert found(documents) == [[2, 0, 1, 3, 3]] and documents.special_tokens == (1, 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_an_error_and_the_next_run_continues(tokenizer, tmp_path, workers):
    """A limit on the size of files stands for a full disk: writing fails in the middle in the same way."""
    rows = texts(40)
    rows[13] = " ".join(WORDS * 3000)
    corpus = Corpus([jsonl(tmp_path / "a.jsonl", rows)])
    with largest_file(60_000), pytest.raises(OSError, match="File too large"):
        tokenize(corpus, tokenizer, tmp_path / "out", workers=workers)
    assert not (tmp_path / "out/manifest.json").exists()
    assert found(tokenize(corpus, tokenizer, tmp_path / "out", workers=workers)) == wanted(corpus, tokenizer)


@pytest.mark.slow
def test_a_run_that_is_killed_continues_to_the_same_bytes_also_beside_its_orphans(tokenizer, tmp_path):
    corpus, out = Corpus([jsonl(tmp_path / "long.jsonl", [SENTENCE * 20] * 1000)]), tmp_path / "out"
    parent = multiprocessing.get_context("fork").Process(target=tokenize, args=(corpus, tokenizer, out))
    parent.start()
    end = time.monotonic() + 60
    while not list(out.glob("logs/completions/*")):
        assert time.monotonic() < end, "no task was complete within a minute"
        time.sleep(0.01)
    orphans = psutil.Process(parent.pid).children(recursive=True)
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    assert not (out / "manifest.json").exists()
    tokenize(corpus, tokenizer, out, workers=2)  # while the processes of the killed run finish their tasks
    for orphan in filter(psutil.Process.is_running, orphans):  # one process of datatrove never ends by itself
        orphan.kill()
    tokenize(corpus, tokenizer, tmp_path / "whole", workers=1)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.runtime
def test_a_local_ray_cluster_continues_an_interrupted_run_to_the_same_bytes(tokenizer, corpus, tmp_path):
    ray = pytest.importorskip("ray", reason="ray is not installed (make test-runtimes)")
    interrupt(corpus, tokenizer, tmp_path / "out")
    first = task_files(tmp_path / "out", 0)["ids"]
    written = first.stat().st_mtime_ns
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        tokenize(corpus, tokenizer, tmp_path / "out", "ray", workers=2)
    finally:
        ray.shutdown()
    tokenize(corpus, tokenizer, tmp_path / "whole", workers=1)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert first.stat().st_mtime_ns == written


def test_the_command_reads_every_named_file_and_prints_what_it_wrote(corpus, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = ["--tokenizer_name", tmp_path / "tokenizer", "--output_dir", tmp_path / "out", "--workers", 1]
    files = ["--files", *corpus.files, "--files", jsonl(tmp_path / "c.jsonl", texts(3))]
    printed = json.loads(run_main(neobert_cli, "tokenize", *words, *files, "--json"))
    assert printed["num_documents"] == 60 and printed["folder"] == str(tmp_path / "out")
