"""Packing plans: on disk as in memory as by hand, every document once; no plan that is partial, damaged or of something else."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from neobert_hf.data import files, plans, shard_reader
from neobert_hf.data.files import sealed
from neobert_hf.data.packing import PackedRows
from neobert_hf.data.permutation import Permutation
from neobert_hf.data.plans import BestFit, NothingToPack, make_packing_plan, read_packing_plan, write_packing_plan
from neobert_hf.data.shards import Shards, write_manifest, write_shard

LENGTHS = st.lists(st.integers(1, 30), min_size=2, max_size=120)
plan_quietly = partial(write_packing_plan, show_progress=False)


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """Several chunks and blocks even of a few documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "CHUNK", 23)
        patch.setattr(plans, "BLOCK", 7)
        yield


@pytest.fixture
def folder(tmp_path):
    """A new folder at each call, for tests with many examples."""
    return lambda: Path(tmp_path, str(len(list(tmp_path.iterdir()))))


def write_documents(folder, lengths, documents_per_shard=10):
    """Shards whose documents hold their own number, repeated."""
    records = []
    for first in range(0, len(lengths), documents_per_shard):
        block = lengths[first : first + documents_per_shard]
        documents = [np.full(length, first + i, np.uint16) for i, length in enumerate(block)]
        folder.mkdir(exist_ok=True)
        record = {"texts": len(block), "texts_sha256": "", "empty": 0}
        records.append(write_shard(folder, len(records), documents, np.uint16, record))
    write_manifest(folder, {"source": {}, "tokenizer": {"sha256": "", "vocab_size": 1 << 16}}, records)
    return Shards(folder)


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
    return [plan.row(number) for number in range(len(plan))]


@given(
    lengths=LENGTHS,
    max_tokens=st.integers(30, 90),
    max_length=st.integers(5, 40),
    max_open_rows=st.integers(1, 6),
    seed=st.integers(0, 99),
    least=st.integers(0, 12),
    num_held_out=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_plans_on_disk_in_memory_and_by_hand_have_the_same_rows(
    tmp_path_factory, lengths, max_tokens, max_length, max_open_rows, seed, least, num_held_out
):
    shards = write_documents(tmp_path_factory.mktemp("plans") / "shards", lengths)
    documents, held_out = shards, []
    if 0 < num_held_out < len(lengths):
        documents, held_out = shards.split(num_held_out, seed)
        held_out = held_out.numbers.tolist()
    documents = documents.longer_than(least)
    chosen = {number for number, length in enumerate(lengths) if length > least} - set(held_out)
    options = dict(max_tokens=max_tokens, max_length=max_length, max_open_rows=max_open_rows, seed=seed)
    if not chosen:
        with pytest.raises(NothingToPack, match=f"holds no document of more than {least} tokens"):
            plan_quietly(documents, **options)
        return
    on_disk = plan_quietly(documents, **options)
    in_memory = make_packing_plan(documents.lengths_of(np.arange(len(shards))), **options)
    assert rows_of(on_disk) == rows_of(in_memory) == rows_by_hand(lengths, chosen, **options)
    assert sorted(on_disk.documents.tolist()) == sorted(chosen)
    tokens = [sum(min(lengths[i], max_length) for i in row) for row in rows_of(on_disk)]
    assert max(tokens) <= max_tokens and sum(tokens) == on_disk.num_tokens == in_memory.num_tokens
    assert plan_quietly(documents, **options).folder == on_disk.folder


@given(lengths=LENGTHS, num_held_out=st.integers(1, 119), least=st.integers(0, 30), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_split_is_disjoint_and_complete_and_subsets_hold_what_they_say(
    tmp_path_factory, lengths, num_held_out, least, seed
):
    shards = write_documents(tmp_path_factory.mktemp("split") / "shards", lengths, documents_per_shard=7)
    num_held_out = min(num_held_out, len(lengths) - 1)
    training, held_out = shards.split(num_held_out, seed)
    assert sorted([*training.numbers, *held_out.numbers]) == list(range(len(lengths)))
    assert len(held_out) == num_held_out and len(training) == len(lengths) - num_held_out
    assert held_out.lengths.tolist() == [lengths[number] for number in held_out.numbers]
    assert [document.tolist() for document in held_out] == [[n] * lengths[n] for n in held_out.numbers]
    longer = training.longer_than(least)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_reader, "CHUNK", 11)  # several chunks
        listed = training.longer_than(least)
        assert len(listed) == len(longer.numbers) and listed.lengths.tolist() == [lengths[n] for n in longer.numbers]
        assert [listed[place].tolist() for place in range(len(listed))] == [[n] * lengths[n] for n in longer.numbers]
        for place in (-1, len(listed)):
            with pytest.raises(IndexError):
                listed[place]
    wanted = [n for n, length in enumerate(lengths) if length > least and n not in set(held_out.numbers.tolist())]
    assert longer.numbers.tolist() == training.longer_than(0).longer_than(least).numbers.tolist() == wanted
    assert [document.tolist() for document in longer] == [[n] * lengths[n] for n in wanted]


def test_a_split_has_another_order_than_packing_and_depends_on_the_seed(tmp_path):
    shards = write_documents(tmp_path / "shards", [5] * 200)
    first = shards.split(50, seed=3)[1].numbers.tolist()
    assert first == shards.split(50, seed=3)[1].numbers.tolist() != shards.split(50, seed=4)[1].numbers.tolist()
    packed_first = Permutation(200, 3, plans.ORDER)(np.arange(50)).tolist()
    assert len(set(first) & set(packed_first)) < 30  # of 50; 12.5 by chance


def test_rows_of_a_plan_are_those_of_packing_in_memory_in_every_pass_and_process(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 30, 200).tolist()
    shards = write_documents(tmp_path / "shards", lengths)
    options = dict(max_length=20, seed=5)
    in_memory = PackedRows(shards, shards.lengths, 64, **options, num_rows=150)
    plan = plan_quietly(shards, 64, **options)
    rows = PackedRows.from_plan(shards.longer_than(0), plan, num_rows=150)  # numbers are those of the shards
    wanted = [in_memory[number] for number in range(150)]
    assert [rows[number] for number in range(150)] == wanted
    assert (rows.num_tokens, rows.packing_efficiency) == (in_memory.num_tokens, in_memory.packing_efficiency)
    pickled = pickle.dumps(rows)
    assert len(pickled) < 2000  # another process opens the files
    again = pickle.loads(pickled)
    assert [again[number] for number in reversed(range(150))] == wanted[::-1]
    assert list(DataLoader(rows, batch_size=1, num_workers=2, collate_fn=lambda batch: batch[0])) == wanted
    with pytest.raises(ValueError, match="num_rows=0 must be at least 1"):
        PackedRows.from_plan(shards, plan, num_rows=0)


def test_each_of_the_settings_has_a_plan_of_its_own(tmp_path):
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    training, _ = shards.split(4)
    others = [
        plan_quietly(shards, 32),
        plan_quietly(shards, 33),
        plan_quietly(shards, 32, max_length=6),
        plan_quietly(shards, 32, max_open_rows=2),
        plan_quietly(shards, 32, seed=1),
        plan_quietly(training, 32),
        plan_quietly(shards.split(4, seed=1)[0], 32),
        plan_quietly(shards.longer_than(4), 32),
    ]
    assert len({plan.folder for plan in others}) == len(others)
    assert all(plan.folder.parent == tmp_path / "shards/plans" for plan in others)


def damaged(file, how):
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
        return
    if how == "flip":
        content[len(content) // 2] ^= 1
    elif how == "zeros":
        content = bytes(len(content))
    elif how == "cut":
        content = content[:-4]
    elif how == "list":
        content = b"[]"
    file.write_bytes(b"" if how == "empty" else content)


@pytest.mark.parametrize("how", ["flip", "zeros", "cut", "empty", "missing"])
@pytest.mark.parametrize("name", ["documents.bin", "row_ends.bin"])
def test_a_damaged_plan_is_refused_by_name_and_made_again_once_it_is_removed(tmp_path, name, how):
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    plan = plan_quietly(shards, 32)
    wanted = rows_of(plan)
    damaged(plan.folder / name, how)
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*; remove {plan.folder}, and the next run"):
        plan_quietly(shards, 32, verify=True)
    if how not in ("flip", "zeros"):  # a size is always compared
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            plan_quietly(shards, 32)
    shutil.rmtree(plan.folder)
    assert rows_of(plan_quietly(shards, 32, verify=True)) == wanted


@pytest.mark.parametrize("how", ["flip", "zeros", "cut", "empty", "list", "other", "no checksum"])
def test_a_damaged_manifest_of_a_plan_is_refused_by_name(tmp_path, how):
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    file = plan_quietly(shards, 32).folder / "plan.json"
    if how == "other":
        file.write_text(json.dumps(sealed({"settings": {}})))
    elif how == "no checksum":
        content = json.loads(file.read_text())
        del content["checksum"]
        file.write_text(json.dumps(content))
    else:
        damaged(file, how)
    with pytest.raises(ValueError, match=r"plan\.json is damaged \(.*\); remove"):
        plan_quietly(shards, 32)


def test_the_plan_of_something_else_is_refused_by_name(tmp_path):
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    one, two = (plan_quietly(shards, 32, seed=seed).folder for seed in (0, 1))
    shutil.rmtree(one)
    shutil.copytree(two, one)
    with pytest.raises(
        ValueError, match=r"plan\.json is the plan of something else: seed is 1 there and 0 here; remove"
    ):
        plan_quietly(shards, 32)
    others = write_documents(tmp_path / "others", [5, 9, 3, 12, 8] * 8)
    theirs = plan_quietly(others, 32, seed=1)
    shutil.rmtree(two)
    shutil.copytree(theirs.folder, two)
    with pytest.raises(ValueError, match="the plan of something else: documents is"):
        plan_quietly(shards, 32, seed=1)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_plan_that_is_partly_written_is_made_again(tmp_path, monkeypatch, number):
    """Whichever of the three writes fails, as on a full disk."""
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    wanted = rows_of(make_packing_plan(shards.lengths, 32))
    fsync, calls = os.fsync, []

    def sync(handle):
        calls.append(handle)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=r"the disk is full: .*; the shards are unchanged"),
    ):
        patch.setattr(files.os, "fsync", sync)
        plan_quietly(shards, 32)
    (folder,) = (tmp_path / "shards/plans").iterdir()
    assert not list(folder.glob("*.part")) and not (folder / "plan.json").exists()
    (folder / "documents.bin.0.part").write_bytes(b"of a process that was killed")
    with pytest.raises(FileNotFoundError, match=r"holds no plan\.json; make the plan with write_packing_plan"):
        read_packing_plan(folder)
    assert rows_of(plan_quietly(shards, 32, verify=True)) == wanted
    assert not list(folder.glob("*.part"))


def _plan_and_report(folder, barrier, results):
    write, made = plans._write_plan, []

    def watched(*args):
        made.append(1)
        write(*args)

    plans._write_plan = watched
    shards = Shards(folder)
    barrier.wait()
    plan = plan_quietly(shards, 64)
    results.put((len(made), plan.documents.tolist(), plan.ends.tolist()))


def test_processes_that_start_together_make_one_plan(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 30, 3000).tolist()
    shards = write_documents(tmp_path / "shards", lengths, documents_per_shard=100)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_plan_and_report, args=(tmp_path / "shards", barrier, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(num_made for num_made, *_ in found) == [0, 0, 1]
    wanted = make_packing_plan(shards.lengths, 64)
    assert all(plan == [wanted.documents.tolist(), wanted.ends.tolist()] for _, *plan in found)


def test_where_nothing_can_be_written_a_plan_is_read_and_a_new_one_is_kept_in_the_spare_folder(
    tmp_path, monkeypatch, caplog
):
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    beside = plan_quietly(shards, 32)
    monkeypatch.setattr(plans.os, "access", lambda folder, mode: tmp_path / "shards" not in (folder, *folder.parents))
    assert plan_quietly(shards, 32, spare_folder=tmp_path / "run").folder == beside.folder
    with caplog.at_level("WARNING", logger="neobert_hf.data.plans"):
        spare = plan_quietly(shards, 48, spare_folder=tmp_path / "run")
    assert spare.folder.parent == tmp_path / "run" and "the packing plan is kept in" in caplog.text
    assert rows_of(spare) == rows_of(make_packing_plan(shards.lengths, 48))


def test_documents_longer_than_a_row_and_numbers_out_of_bounds_are_refused(tmp_path):
    shards = write_documents(tmp_path / "shards", [5, 40, 3])
    with pytest.raises(
        ValueError,
        match=r"document 1 has 40 tokens, a row takes 1 to 32; raise row_tokens \(max_tokens\) or lower max_length=None",
    ):
        plan_quietly(shards, 32)
    assert rows_of(plan_quietly(shards, 32, max_length=32))
    for name in ("max_tokens", "max_length", "max_open_rows"):
        with pytest.raises(ValueError, match=f"{name}=0.* must be at least 1"):
            plan_quietly(shards, **{"max_tokens": 64} | {name: 0})


def test_whole_numbers_of_numpy_are_those_of_python_and_other_values_are_refused(tmp_path):
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    wanted = plan_quietly(shards.longer_than(4), 32, 20, 3, seed=6)
    numbers = (np.int32(32), np.int64(20), np.uint8(3), np.int64(6))
    assert plan_quietly(shards.longer_than(np.int64(4)), *numbers).folder == wanted.folder
    assert rows_of(make_packing_plan(shards.lengths_of(np.arange(40)), *numbers)) == rows_of(
        make_packing_plan(shards.lengths, 32, 20, 3, 6)
    )
    for name, value in (
        ("seed", None),
        ("seed", 1.5),
        ("max_tokens", 32.0),
        ("max_length", "9"),
        ("max_open_rows", None),
    ):
        for make in (partial(plan_quietly, shards), partial(make_packing_plan, shards.lengths)):
            with pytest.raises(TypeError, match=f"{name}={value!r} must be a whole number"):
                make(**{"max_tokens": 32, name: value})
    with pytest.raises(TypeError, match="seed=None must be a whole number"):
        shards.split(4, seed=None)


def test_a_new_plan_beside_one_with_other_settings_is_reported_with_the_difference(tmp_path, caplog):
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    plan_quietly(shards, 64, seed=1)
    plan_quietly(shards.longer_than(4), 64, seed=1)  # another part of a mixture
    plan_quietly(shards, 64, seed=1)
    assert not caplog.records
    plan = plan_quietly(shards, 32, seed=1)
    (record,) = caplog.records
    assert "other settings (row_tokens is 64 there and 32 here); a new plan is made in" in record.getMessage()
    assert str(plan.folder) in record.getMessage()
    caplog.clear()
    plan_quietly(shards.split(4)[0], 32, seed=1)
    assert "held-out documents is none there and" in caplog.text


def test_a_shard_that_cannot_be_read_is_named_and_not_reported_as_a_write_error(tmp_path, monkeypatch):
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    assert len(shards[0])

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=r"error: shard-00000\.arrow could not be read") as found,
    ):
        patch.setattr(os, "pread", fail)
        plan_quietly(shards, 32)
    assert "written" not in str(found.value) and found.value.filename == str(tmp_path / "shards/shard-00000.arrow")
    assert rows_of(plan_quietly(shards, 32))


def test_a_plan_is_kept_in_the_spare_folder_if_its_own_folder_is_read_only(tmp_path, monkeypatch):
    """As after a run of another user, who made `plans` writable for all but not the folder of this plan."""
    shards = write_documents(tmp_path / "shards", [5, 9, 3, 12, 7] * 8)
    folder = plan_quietly(shards, 32).folder
    (folder / "plan.json").unlink()
    monkeypatch.setattr(plans.os, "access", lambda path, mode: Path(path) != folder)
    assert plan_quietly(shards, 32, spare_folder=tmp_path / "run").folder.parent == tmp_path / "run"
    monkeypatch.setattr(plans.os, "access", lambda path, mode: Path(path) != folder / plans.LOCK)
    assert plan_quietly(shards, 32, spare_folder=tmp_path / "run2").folder.parent == tmp_path / "run2"


def test_numbers_of_documents_take_as_few_bytes_as_they_can():
    assert make_packing_plan(np.array([3, 4]), 8).documents.dtype == np.uint32
    assert plans._dtype((1 << 32) - 1).itemsize == 4
    assert plans._dtype(1 << 32).itemsize == 8  # the last row ends at the number of documents


@given(lengths=st.lists(st.integers(1, 20), max_size=80), max_open_rows=st.integers(1, 5), cut=st.integers(0, 80))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_open_rows_that_are_handed_over_are_filled_as_before(lengths, max_open_rows, cut):
    items = [[number] * length for number, length in enumerate(lengths)]

    def place(packer, items):
        return [row for item in items if (row := packer.place(item, len(item))) is not None]

    whole = BestFit(20, max_open_rows)
    wanted = place(whole, items) + whole.rest()
    first = BestFit(20, max_open_rows)
    found = place(first, items[:cut])
    second = BestFit(20, max_open_rows, [list(row) for row in first.rows])
    assert found + place(second, items[cut:]) + second.rest() == wanted
    assert second.rows == []
