"""The order without a list: one to one for every size, another one for every seed, and as random as a shuffled list."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from neobert_hf.pretraining.permutation import Permutation

WORD = (1 << 64) - 1


def by_hand(size, seed, purpose, place):
    """The same network in Python's own integers, for one place."""
    bits = max((size - 1).bit_length(), 6)
    low_bits = bits // 2
    keys = np.random.SeedSequence(seed, spawn_key=purpose).generate_state(8, np.uint64).tolist()

    def mixed(number, key):
        number = (number + key) * 0xBF58476D1CE4E5B9 & WORD
        number = (number ^ number >> 32) * 0x94D049BB133111EB & WORD
        return number ^ number >> 32

    while True:
        high, low = place >> low_bits, place % (1 << low_bits)
        for round_number, key in enumerate(keys):
            if round_number % 2:
                low ^= mixed(high, key) % (1 << low_bits)
            else:
                high ^= mixed(low, key) % (1 << (bits - low_bits))
        place = high << low_bits | low
        if place < size:
            return place


@given(
    size=st.integers(1, 5000) | st.sampled_from([2**k + d for k in (6, 10, 16) for d in (-1, 0, 1)]),
    seed=st.integers(0, 2**64),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_number_stands_at_one_place(size, seed):
    found = Permutation(size, seed)(np.arange(size))
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(size))


@given(
    size=st.integers(1, 1 << 62),
    seed=st.integers(0, 99),
    purpose=st.lists(st.integers(0, 99), max_size=2).map(tuple),
    place=st.integers(0, 1 << 62),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_elements_are_those_of_the_network_by_hand(size, seed, purpose, place):
    place %= size
    assert Permutation(size, seed, *purpose)(np.array([place])).tolist() == [by_hand(size, seed, purpose, place)]


def test_each_seed_and_each_purpose_have_an_order_of_their_own():
    seeds = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1 << 32,), (1, 1), (1 << 40, 1)]
    assert len({tuple(Permutation(1000, *seed)(np.arange(1000))) for seed in seeds}) == len(seeds)


def test_the_order_of_many_numbers_is_uniform_and_neighbours_are_independent():
    size = 300_000
    order = Permutation(size, 7)(np.arange(size))
    counts = np.histogram2d(np.arange(size), order, bins=20, range=[[0, size]] * 2)[0]
    expected = size / 400
    assert ((counts - expected) ** 2 / expected).sum() < 500  # 361 degrees of freedom: mean 361, 99.9 % quantile 450
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / size**0.5
    assert abs((np.diff(order) > 0).mean() - 0.5) < 4 / size**0.5
    assert (order == np.arange(size)).sum() < 10  # fixed points: 1 on average


def test_the_order_is_pinned():
    """A change here changes the rows of every run."""
    assert Permutation(10, 0)(np.arange(10)).tolist() == [3, 6, 4, 5, 7, 1, 8, 9, 2, 0]
