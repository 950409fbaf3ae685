"""Embedding a corpus on Ray Data: no row is lost or repeated when a worker or the whole run is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("ray", reason="ray is not installed (make test-runtimes)")
pytestmark = pytest.mark.runtime

SCRIPT = Path(__file__).parents[2] / "examples/embed_corpus_ray.py"
NUM_ROWS = 4 * 1024 + 100  # five blocks, on two workers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("corpus")
    texts = [None if i == 7 else f"Return item {i} of list {i * 7}." for i in range(NUM_ROWS)]
    for part in range(3):
        ids = list(range(part, NUM_ROWS, 3))
        table = pa.table({"id": ids, "other": ids, "text": [texts[i] for i in ids]})
        parquet.write_table(table, folder / f"{part}.parquet")
    return folder, texts


def start(corpus, output, *more):
    command = [sys.executable, SCRIPT, "--files", corpus, "--output_dir", output, *more]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1] / "src")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(list(map(str, command)), cwd=output.parent, env=environment, **pipes)


def wait_for_a_block(run, output):
    """Wait until a block is written, and recorded as such beside the output."""
    while not [file for file in output.parent.glob("vectors.*/*.parquet") if ".pending" not in file.name]:
        assert run.poll() is None, run.stdout.read()
        time.sleep(0.1)


def workers(run):
    """The processes that hold a model."""
    processes = psutil.Process(run.pid).children(recursive=True)
    return [process for process in processes if "Embedder" in " ".join(process.cmdline())]


def check_rows(output, texts):
    """Every row once, with the vector that one process computes."""
    from pyarrow import parquet
    from sentence_transformers import SentenceTransformer

    import neobert_hf

    table = parquet.read_table(output).sort_by("id").to_pydict()
    assert list(table) == ["id", "text", "embedding"]
    assert table["id"] == list(range(NUM_ROWS)) and table["text"] == texts
    assert table["embedding"][7] is None
    found = np.array([vector for vector in table["embedding"] if vector is not None])
    wanted = SentenceTransformer(neobert_hf.MINI_MODEL_PATH).encode([text for text in texts if text is not None])
    np.testing.assert_allclose(found, wanted, atol=1e-6)  # other batches: the last bits differ


def test_every_row_has_its_vector_once_although_a_worker_is_killed(corpus, tmp_path):
    folder, texts = corpus
    run = start(folder, tmp_path / "vectors")
    wait_for_a_block(run, tmp_path / "vectors")
    first = workers(run)
    first[0].kill()
    first[0].wait()
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    assert len(first) == 2
    check_rows(tmp_path / "vectors", texts)
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
    check_rows(output, texts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text_column", "body"], "no rows with the columns ['id', 'body'], but with ['id', 'other', 'text']"),
        (["--files", "empty.parquet"], "no rows with the columns"),
        (["--files", "missing"], "missing"),
        (["--output_dir", "full"], "has files of another run; choose a new folder"),
        (["--dtype", "int9"], "dtype"),
    ],
)
def test_bad_input_ends_with_one_line(arguments, words, corpus, tmp_path):
    from pyarrow import parquet

    parquet.write_table(pa.table({"id": pa.array([], pa.int64()), "text": []}), tmp_path / "empty.parquet")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    run = start(corpus[0], tmp_path / "vectors", *arguments)
    printed, _ = run.communicate()
    lines = [line for line in printed.splitlines() if "Loading weights" not in line]
    assert run.returncode == 1 and len(lines) == 1 and words in lines[0], printed
    assert not (tmp_path / "vectors").exists()
