"""Documents by number: lengths, splits and selections by hand, damage found, and nothing of the process kept."""

import pickle

import numpy as np
import psutil
import pytest
from conftest import write_documents
from hypothesis import given, settings
from hypothesis import strategies as st

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
def test_a_split_is_disjoint_and_whole_and_selections_are_right(tmp_path_factory, lengths, num_held_out, least, seed):
    documents = write_documents(tmp_path_factory.mktemp("split"), lengths, documents_per_task=7)
    num_held_out = min(num_held_out, len(lengths) - 1)
    training, held_out = documents.split(num_held_out, seed)
    numbers = held_out.indices.tolist()
    assert len(held_out) == len(set(numbers)) == num_held_out and len(training) == len(lengths) - num_held_out
    assert [document.tolist() for document in held_out] == [[n] * lengths[n] for n in numbers]
    wanted = [0 if n in numbers or length <= least else length for n, length in enumerate(lengths)]
    longer = training.longer_than(least)
    assert longer.lengths.tolist() == longer.longer_than(0).lengths.tolist() == wanted
    assert len(longer) == sum(length > 0 for length in wanted)
    assert documents.longer_than(least).lengths.tolist() == [length * (length > least) for length in lengths]


def test_a_split_has_another_order_than_packing_and_depends_on_the_seed(tmp_path):
    documents = write_documents(tmp_path, [5] * 200)
    first = documents.split(50, seed=3)[1].indices.tolist()
    assert first == documents.split(50, seed=3)[1].indices.tolist() != documents.split(50, seed=4)[1].indices.tolist()
    packed_first = Permutation(200, 3, plans.ORDER)(np.arange(50)).tolist()
    assert len(set(first) & set(packed_first)) < 30  # of 50; 12.5 by chance
    with pytest.raises(ValueError, match="num_held_out=200 of 200"):
        documents.split(200)


@pytest.mark.parametrize("name", ["ids", "ends"])
def test_a_file_of_another_size_is_found_at_every_start(tmp_path, name):
    write_documents(tmp_path, LENGTHS)
    file = task_files(tmp_path, 3)[name]
    for damage in (lambda: file.write_bytes(file.read_bytes()[:-8]), file.unlink):
        damage()
        with pytest.raises(ValueError, match=r"00003_unshuffled\.ds.* is missing or has another size than manifest"):
            Documents(tmp_path)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b'{"num_documents": 4', ValueError, r"manifest\.json is not JSON"),
        (None, FileNotFoundError, r"holds no manifest\.json; tokenize into it first"),
    ],
)
def test_a_folder_without_a_whole_manifest_is_not_finished(tmp_path, content, error, message):
    write_documents(tmp_path, LENGTHS)
    (tmp_path / "manifest.json").unlink()
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(error, match=message):
        Documents(tmp_path)
