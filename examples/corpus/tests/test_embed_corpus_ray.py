"""Embedding a corpus on Ray Data: no row is lost or repeated when a worker or the whole run is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from sentence_transformers import SentenceTransformer

from neobert_hf import MINI_MODEL_PATH

pytest.importorskip("ray", reason="ray is not installed (make test-runtimes)")
pytestmark = pytest.mark.runtime

from pyarrow import parquet  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "embed_corpus_ray.py"
NUM_ROWS = 4 * 1024 + 100  # five blocks, on two workers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = [None if i == 7 else f"Return item {i} of list {i * 7}." for i in range(NUM_ROWS)]
    for part in range(3):
        ids = list(range(part, NUM_ROWS, 3))
        table = pa.table({"id": ids, "other": ids, "text": [texts[i] for i in ids]})
        parquet.write_table(table, folder / f"{part}.parquet")
    return folder, texts


def start(corpus, output, model=MINI_MODEL_PATH, dtype="float32"):
    command = [sys.executable, SCRIPT, corpus, output, "--model", model, "--dtype", dtype]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2] / "src")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(list(map(str, command)), cwd=output.parent, env=environment, **pipes)


def wait_for_a_block(run, output):
    while not [file for file in output.parent.glob("vectors.*/*.parquet") if ".pending" not in file.name]:
        assert run.poll() is None, run.stdout.read()
        time.sleep(0.1)


def check_rows(output, texts, tolerance):
    """Every row once, with the vector that one process computes."""
    table = parquet.read_table(output).sort_by("id").to_pydict()
    assert list(table) == ["id", "text", "embedding"]
    assert table["id"] == list(range(NUM_ROWS)) and table["text"] == texts
    wanted = SentenceTransformer(MINI_MODEL_PATH).encode([text or "" for text in texts])
    np.testing.assert_allclose(table["embedding"], wanted, atol=tolerance * np.abs(wanted).max())


def test_every_row_has_its_vector_once_although_a_worker_is_killed(corpus, exported_mini, tmp_path):
    folder, texts = corpus
    output = tmp_path / "vectors"
    run = start(folder, output, exported_mini, "fp32")
    wait_for_a_block(run, output)
    processes = psutil.Process(run.pid).children(recursive=True)
    models = [process for process in processes if "Embedder" in " ".join(process.cmdline())]
    models[0].kill()
    models[0].wait()
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    assert len(models) > 1
    check_rows(output, texts, 1e-5)  # the limit of an export
    assert [entry.name for entry in tmp_path.iterdir()] == ["vectors"]  # the record of what is done is gone


def test_a_run_after_an_interruption_computes_what_is_missing(corpus, tmp_path):
    folder, texts = corpus
    output = tmp_path / "vectors"
    run = start(folder, output)
    wait_for_a_block(run, output)
    processes = psutil.Process(run.pid).children(recursive=True)
    for process in (psutil.Process(run.pid), *processes):  # as at a power failure
        process.kill()
    run.communicate()
    psutil.wait_procs(processes)
    before = {file: file.stat().st_mtime_ns for file in output.iterdir()}
    run = start(folder, output)
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    assert [file for file, written in before.items() if file.exists() and file.stat().st_mtime_ns == written]
    check_rows(output, texts, 1e-6)  # other batches: the last bits differ


@pytest.mark.parametrize(
    ("files", "output", "dtype", "words"),
    [
        ("no_texts.parquet", "vectors", "float32", "text"),
        ("missing", "vectors", "float32", "missing"),
        ("corpus", "full", "float32", "has files of another run; choose a new folder"),
        ("corpus", "vectors", "int9", "dtype"),
    ],
)
def test_bad_input_ends_with_one_line(files, output, dtype, words, corpus, tmp_path):
    parquet.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "no_texts.parquet")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    run = start(corpus[0] if files == "corpus" else files, tmp_path / output, dtype=dtype)
    printed, _ = run.communicate()
    lines = [line for line in printed.splitlines() if line and "Loading weights" not in line]
    assert run.returncode == 1 and len(lines) == 1 and words in lines[0], printed
    assert not (tmp_path / "vectors").exists()
