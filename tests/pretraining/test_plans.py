"""Packing plans: on disk as in memory as by hand, every document once; no plan that is partial, damaged or of something else."""

import errno
import multiprocessing
import os
import pickle
import shutil
from functools import partial

import numpy as np
import pytest
from conftest import packed_rows, write_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from neobert_hf.files import output as writing
from neobert_hf.pretraining import plans
from neobert_hf.pretraining.documents import Documents
from neobert_hf.pretraining.packing import PackedRows
from neobert_hf.pretraining.permutation import Permutation
from neobert_hf.pretraining.plans import PackingSettings, make_packing_plan, write_packing_plan

LENGTHS = st.lists(st.integers(1, 30), min_size=2, max_size=120)
OPTIONS = {"max_tokens": (30, 90), "max_length": (5, 40), "max_open_rows": (1, 6), "seed": (0, 99)}
plan_quietly = partial(write_packing_plan, show_progress=False)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Several blocks even of a few documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "BLOCK", 7)
        yield


def plan_of(lengths, max_tokens, **settings):
    return make_packing_plan(lengths, PackingSettings(max_tokens, **settings))


def rows_by_hand(lengths, chosen, max_tokens, max_length, max_open_rows, seed):
    """Best fit with plain lists: the fullest row that has room, the first of equal ones; the order is that of `Permutation`."""
    open_rows, complete = [], []
    for number in Permutation(len(lengths), seed, plans.ORDER)(np.arange(len(lengths))).tolist():
        if number not in chosen:
            continue
        length = min(lengths[number], max_length)
        with_room = [row for row in open_rows if sum(n for _, n in row) + length <= max_tokens]
        if with_room:
            row = max(with_room, key=lambda row: sum(n for _, n in row))
        else:
            open_rows.append(row := [])
        row.append((number, length))
        fullest = max(open_rows, key=lambda row: sum(n for _, n in row))
        if sum(n for _, n in row) == max_tokens:
            fullest = row
        elif len(open_rows) <= max_open_rows:
            continue
        complete.append(fullest)
        open_rows = [row for row in open_rows if row is not fullest]
    complete += sorted(open_rows, key=lambda row: -sum(n for _, n in row))
    return [[number for number, _ in row] for row in complete]


def rows_of(plan):
    """Documents in the rows; without chunks every document is one piece."""
    rows = [plan.row(number) for number in range(len(plan))]
    assert plan.num_pieces == 1 and all(piece == 0 for row in rows for _, piece in row)
    return [[document for document, _ in row] for row in rows]


@given(
    lengths=LENGTHS,
    options=st.fixed_dictionaries({name: st.integers(*bounds) for name, bounds in OPTIONS.items()}),
    least=st.integers(0, 12),
    num_held_out=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_plans_on_disk_in_memory_and_by_hand_have_the_same_rows(
    tmp_path_factory, lengths, options, least, num_held_out
):
    documents = write_documents(tmp_path_factory.mktemp("plans"), lengths)
    selection, held_out = documents.longer_than(0), []
    if 0 < num_held_out < len(lengths):
        selection, held_out = documents.split(num_held_out, options["seed"])
        held_out = held_out.indices.tolist()
    selection = selection.longer_than(least)
    chosen = {number for number, length in enumerate(lengths) if length > least} - set(held_out)
    if not chosen:
        with pytest.raises(ValueError, match=f"none of the {len(lengths)} documents is left to pack"):
            plan_quietly(selection, **options)
        return
    on_disk = plan_quietly(selection, **options)
    in_memory = plan_of(selection.lengths, **options)
    assert rows_of(on_disk) == rows_of(in_memory) == rows_by_hand(lengths, chosen, **options)
    assert sorted(on_disk.items.tolist()) == sorted(chosen)
    tokens = [sum(min(lengths[i], options["max_length"]) for i in row) for row in rows_of(on_disk)]
    assert max(tokens) <= options["max_tokens"] and sum(tokens) == on_disk.num_tokens == in_memory.num_tokens
    assert plan_quietly(selection, **options).folder == on_disk.folder


def test_rows_of_a_plan_are_those_of_packing_in_memory_in_every_pass_and_process(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 30, 200).tolist()
    documents = write_documents(tmp_path / "documents", lengths)
    options = dict(max_length=20, seed=5)
    in_memory = packed_rows(documents, 64, **options, num_rows=150)
    plan = plan_quietly(documents, 64, **options)
    rows = PackedRows(documents.longer_than(0), plan, num_rows=150)
    wanted = [in_memory[number] for number in range(150)]
    assert [rows[number] for number in range(150)] == wanted
    assert rows.plan.num_tokens == in_memory.plan.num_tokens
    pickled = pickle.dumps(rows)
    assert len(pickled) < 2000  # another process opens the files
    again = pickle.loads(pickled)
    assert [again[number] for number in reversed(range(150))] == wanted[::-1]
    assert list(DataLoader(rows, batch_size=1, num_workers=2, collate_fn=lambda batch: batch[0])) == wanted


def test_each_of_the_settings_has_a_plan_of_its_own(tmp_path):
    documents = write_documents(tmp_path / "documents", [5, 9, 3, 12, 7] * 8)
    training, _ = documents.split(4)
    chunks = {"max_length": 6, "long_documents": "chunk"}
    settings = ({}, chunks, {"max_length": 6}, {"max_open_rows": 2}, {"seed": 1})
    others = [plan_quietly(documents, 32, **each) for each in settings]
    parts = (training, documents.split(4, seed=1)[0], documents.longer_than(4))
    others += [plan_quietly(documents, 33), *(plan_quietly(part, 32) for part in parts)]
    assert others[0].settings == PackingSettings(32)
    assert len({plan.folder for plan in others}) == len(others)
    assert all(plan.folder.parent == tmp_path / "documents/plans" for plan in others)


@pytest.mark.parametrize("how", ["cut", "empty", "missing"])
@pytest.mark.parametrize("name", ["items.npy", "ends.npy", "plan.json"])
def test_a_damaged_plan_is_refused_by_name_and_made_again_once_it_is_removed(tmp_path, name, how):
    documents = write_documents(tmp_path / "documents", [5, 9, 3, 12, 7] * 8)
    plan = plan_quietly(documents, 32)
    wanted, file = rows_of(plan), plan.folder / name
    content = file.read_bytes()
    file.unlink()
    if how != "missing":
        file.write_bytes(content[:-4] if how == "cut" else b"")
    if (name, how) == ("plan.json", "missing"):  # of a process that was killed
        (plan.folder / "items.npy.0.part").touch()
    else:
        with pytest.raises(ValueError, match=f"{plan.folder}.* is damaged"):
            plan_quietly(documents, 32)
        shutil.rmtree(plan.folder)
    assert rows_of(plan_quietly(documents, 32)) == wanted
    assert not list(plan.folder.glob("*.part"))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_plan_that_is_partly_written_is_made_again(tmp_path, monkeypatch, number):
    """Whichever of the three writes fails, as on a full disk."""
    documents = write_documents(tmp_path / "documents", [5, 9, 3, 12, 7] * 8)
    fsync, calls = os.fsync, []

    def sync(handle):
        calls.append(handle)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"cannot be written \(.*No space left on device"):
        patch.setattr(writing.os, "fsync", sync)
        plan_quietly(documents, 32)
    (folder,) = (tmp_path / "documents/plans").iterdir()
    assert not (folder / "plan.json").exists()
    assert rows_of(plan_quietly(documents, 32)) == rows_of(plan_of(documents.lengths, 32))


def _plan_and_report(folder, barrier, results):
    make, made = plans.make_packing_plan, []

    def watched(*args):
        made.append(1)
        return make(*args)

    plans.make_packing_plan = watched
    documents = Documents(folder)
    barrier.wait()
    plan = plan_quietly(documents, 64)
    results.put((len(made), plan.items.tolist(), plan.ends.tolist()))


def test_processes_that_start_together_make_one_plan(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 30, 3000).tolist()
    documents = write_documents(tmp_path / "documents", lengths, documents_per_task=100)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = tmp_path / "documents", barrier, results
    processes = [context.Process(target=_plan_and_report, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(num_made for num_made, *_ in found) == [0, 0, 1]
    wanted = plan_of(documents.lengths, 64)
    assert all(plan == [wanted.items.tolist(), wanted.ends.tolist()] for _, *plan in found)


def test_where_nothing_can_be_written_a_plan_is_read_and_a_new_one_is_kept_elsewhere(tmp_path, monkeypatch):
    documents = write_documents(tmp_path / "documents", [5, 9, 3, 12, 7] * 8)
    beside = plan_quietly(documents, 32)
    monkeypatch.setattr(plans.os, "access", lambda *_: False)  # this test may run as root, who may write anywhere
    assert plan_quietly(documents, 32, fallback_folder=tmp_path / "run").folder == beside.folder
    spare = plan_quietly(documents, 48, fallback_folder=tmp_path / "run")
    assert spare.folder.parent == tmp_path / "run"
    assert rows_of(spare) == rows_of(plan_of(documents.lengths, 48))


def test_items_of_a_plan_take_as_few_bytes_as_they_can():
    assert plan_of(np.array([3, 4]), 8).items.dtype == np.uint32
    lengths = np.array([3, 1 << 31])  # a document of 2^31 pieces, and two documents
    assert plans._num_pieces(lengths, PackingSettings(8, 1, "chunk")).tolist() == [3, 1 << 31]


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=60).filter(any),
    max_length=st.integers(3, 20),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_plan_of_chunks_holds_every_piece_once(lengths, max_length, seed):
    special = dict(special_tokens=(1, 1), long_documents="chunk")
    lengths = [length + 2 if length else 0 for length in lengths]
    plan = plan_of(np.array(lengths), 20, max_length=max_length, seed=seed, **special)
    rows = [plan.row(number) for number in range(len(plan))]
    pieces = [(i, k) for i, n in enumerate(lengths) if n for k in range(-(-(n - 2) // (max_length - 2)))]
    assert sorted(item for row in rows for item in row) == pieces
    tokens = [sum(len(plan.cut(np.zeros(lengths[i]), k)) for i, k in row) for row in rows]
    assert max(tokens) <= 20 and sum(tokens) == plan.num_tokens
