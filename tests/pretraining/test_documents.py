"""Documents by number: lengths, splits and selections by hand, damage found, and nothing of the process kept."""

import json
import pickle

import numpy as np
import psutil
import pytest
from conftest import write_documents
from hypothesis import given, settings
from hypothesis import strategies as st

from neobert_hf.files.writing import sealed
from neobert_hf.pretraining import documents as documents_module
from neobert_hf.pretraining import plans
from neobert_hf.pretraining.documents import Documents, task_files
from neobert_hf.pretraining.permutation import Permutation

LENGTHS = [5, 9, 3, 12, 7] * 8


def test_documents_are_read_in_any_order_by_any_process(tmp_path):
    documents = write_documents(tmp_path, LENGTHS)
    assert len(documents) == 40 and documents.lengths.tolist() == LENGTHS
    for found in (documents, pickle.loads(pickle.dumps(documents))):
        for number in np.random.default_rng(0).permutation(40).tolist():
            assert found[number].tolist() == [number] * LENGTHS[number]
    assert [document.tolist() for document in documents] == [[n] * length for n, length in enumerate(LENGTHS)]
    for number in (-1, 40):
        with pytest.raises(IndexError, match=f"document {number} of 40"):
            documents[number]
    assert len(pickle.dumps(documents)) < 500  # another process maps the files again


def test_few_files_are_open_at_a_time_and_none_after_the_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "MAX_MAPPED", 3)
    documents = write_documents(tmp_path, LENGTHS, documents_per_task=2)
    before = psutil.Process().num_fds()
    assert all(len(documents[number]) == LENGTHS[number] for number in [*range(40)] * 2)
    assert psutil.Process().num_fds() <= before + 2 * 3
    del documents
    assert psutil.Process().num_fds() <= before


@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=120),
    num_held_out=st.integers(1, 119),
    least=st.integers(0, 30),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_split_is_disjoint_and_complete_and_selections_hold_what_they_say(
    tmp_path_factory, lengths, num_held_out, least, seed
):
    documents = write_documents(tmp_path_factory.mktemp("split"), lengths, documents_per_task=7)
    num_held_out = min(num_held_out, len(lengths) - 1)
    training, held_out = documents.split(num_held_out, seed)
    numbers = held_out.numbers.tolist()
    assert len(held_out) == len(set(numbers)) == num_held_out and len(training) == len(lengths) - num_held_out
    assert [document.tolist() for document in held_out] == [[n] * lengths[n] for n in numbers]
    assert held_out.lengths.tolist() == [lengths[n] for n in numbers]
    wanted = [0 if n in numbers or length <= least else length for n, length in enumerate(lengths)]
    longer = training.longer_than(least)
    assert longer.lengths.tolist() == longer.longer_than(0).lengths.tolist() == wanted
    assert len(longer) == sum(length > 0 for length in wanted)
    assert documents.longer_than(least).lengths.tolist() == [length * (length > least) for length in lengths]


def test_a_split_has_another_order_than_packing_and_depends_on_the_seed(tmp_path):
    documents = write_documents(tmp_path, [5] * 200)
    first = documents.split(50, seed=3)[1].numbers.tolist()
    assert first == documents.split(50, seed=3)[1].numbers.tolist() != documents.split(50, seed=4)[1].numbers.tolist()
    packed_first = Permutation(200, 3, plans.ORDER)(np.arange(50)).tolist()
    assert len(set(first) & set(packed_first)) < 30  # of 50; 12.5 by chance
    with pytest.raises(ValueError, match="num_held_out=200 of 200"):
        documents.split(200)


@pytest.mark.parametrize("name", ["ids", "ends"])
def test_a_damaged_file_is_found_by_the_manifest(tmp_path, name):
    write_documents(tmp_path, LENGTHS)
    file = task_files(tmp_path, 3)[name]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} is damaged: it is not what the manifest says"):
        Documents(tmp_path, verify=True)
    file.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        Documents(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file} is missing"):
        Documents(tmp_path)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "list", "no checksum", "other number"])
def test_a_damaged_manifest_is_named_and_every_digit_is_under_its_checksum(tmp_path, damage):
    manifest = tmp_path / "manifest.json"
    content = write_documents(tmp_path, LENGTHS).manifest
    if damage == "flip":
        changed = bytearray(manifest.read_bytes())
        changed[len(changed) * 2 // 3] ^= 1
    elif damage == "other number":
        changed = json.dumps(sealed(content) | {"num_tokens": content["num_tokens"] + 1}).encode()
    else:
        half = manifest.read_bytes()[: manifest.stat().st_size // 2]
        changed = {"cut": half, "empty": b"", "list": b"[5]", "no checksum": json.dumps(content).encode()}[damage]
    manifest.write_bytes(changed)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged \(.*\); restore it, or remove the folder"):
        Documents(tmp_path)


def test_a_folder_without_a_manifest_is_not_finished(tmp_path):
    write_documents(tmp_path, LENGTHS)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no manifest\.json; tokenize into it first"):
        Documents(tmp_path)
