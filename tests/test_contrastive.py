"""Contrastive training: the sampler's shares and order, the loss against its formula, instructions that decide."""

from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip(
    "sentence_transformers", reason="contrastive training needs sentence-transformers (pip install -e .[embed])"
)

from datasets import Dataset
from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler
from torch.utils.data import ConcatDataset, RandomSampler

from neobert_hf.contrastive import SizeExponentBatchSampler

SIZES = (6400, 1600, 100)


def stream(sizes=SIZES, seed=0, epoch=0, batch_size=4, **options):
    """The sampler as the trainer builds it: children that share one generator."""
    datasets = [Dataset.from_dict({"anchor": [f"{i} {j}" for j in range(size)]}) for i, size in enumerate(sizes)]
    generator = torch.Generator()
    children = [
        DefaultBatchSampler(
            RandomSampler(dataset, generator=generator), batch_size, drop_last=True, generator=generator, seed=seed
        )
        for dataset in datasets
    ]
    sampler = SizeExponentBatchSampler(ConcatDataset(datasets), children, generator, seed, **options)
    sampler.set_epoch(epoch)
    return sampler


def datasets_of(batches, sizes=SIZES):
    """The dataset of each batch; a batch of two datasets fails."""
    ends = np.cumsum(sizes)
    found = [set(np.searchsorted(ends, batch, side="right").tolist()) for batch in batches]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_datasets_are_drawn_by_their_size_to_the_exponent(exponent):
    num_batches = 2000
    counts = Counter(datasets_of(stream(num_batches=num_batches, exponent=exponent)))
    weights = np.array(SIZES, float) ** exponent
    for dataset, share in enumerate(weights / weights.sum()):
        sigma = np.sqrt(num_batches * share * (1 - share))
        assert abs(counts[dataset] - num_batches * share) < 3 * sigma


def test_a_small_dataset_starts_again_in_a_new_order_and_every_pass_has_each_row_once():
    batches = list(stream(sizes=(40, 8), num_batches=60, exponent=0.0))
    small = [batch for batch, dataset in zip(batches, datasets_of(batches, (40, 8))) if dataset == 1]
    passes = [[row for batch in small[i : i + 2] for row in batch] for i in range(0, len(small) - 1, 2)]
    assert len(passes) > 5
    assert all(sorted(rows) == list(range(40, 48)) for rows in passes)
    assert len(set(map(tuple, passes))) == len(passes)


def test_the_stream_is_a_function_of_seed_and_epoch_so_a_resumed_run_goes_on_with_it():
    whole = list(stream(num_batches=200))
    again = stream(num_batches=200)
    assert list(again) == whole == list(again)
    rest = iter(stream(num_batches=200))
    for _ in range(120):  # what accelerate does when a run goes on
        next(rest)
    assert list(rest) == whole[120:]
    assert list(stream(num_batches=200, seed=1)) != whole != list(stream(num_batches=200, epoch=1))


def test_a_group_of_batches_is_of_one_dataset():
    drawn = datasets_of(stream(num_batches=300, exponent=0.0, group=3))
    assert all(len(set(drawn[i : i + 3])) == 1 for i in range(0, 300, 3))
    assert len(set(drawn)) == 3


def test_batches_without_duplicates_can_be_its_children():
    datasets = [Dataset.from_dict({"anchor": list("aabbccdd")}), Dataset.from_dict({"anchor": list("efghijkl")})]
    children = [
        NoDuplicatesBatchSampler(d, batch_size=4, drop_last=True, generator=torch.Generator(), seed=0) for d in datasets
    ]
    both = ConcatDataset(datasets)
    for batch in SizeExponentBatchSampler(both, children, num_batches=40):
        assert len({both[row]["anchor"] for row in batch}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_batches=0), "num_batches=0"),
        (dict(num_batches=4, exponent=-1.0), "exponent=-1.0"),
        (dict(num_batches=5, group=2), "no multiple of group=2"),
        (dict(num_batches=4, sizes=(100, 3)), "a dataset of 3 rows fills no batch of 4"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        stream(**options)
