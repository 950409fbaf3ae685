"""Random order without a list: each element of a permutation is computed from its place.

numpy's `Generator.permutation` would hold the order of the paper's corpus in memory: 7.7 GB for its 968 million documents in the
process that plans, and 0.6 GB for its 73 million rows in each training process and in each of its workers.
"""

import numpy as np

ROUNDS = 8
MIN_BITS = 6  # a smaller network reaches too few of the permutations of a few numbers
BLOCK = 1 << 15  # places that are computed together: they fit into the processor's cache
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
SHIFT = np.uint64(32)


class Permutation:
    """Random permutation of the numbers from 0 to `size` - 1, in constant memory.

    A Feistel network with `ROUNDS` rounds permutes the numbers below a power of two. A result of `size` or more is permuted
    again until it is below `size` (cycle walking), which keeps the mapping one to one.

    Args:
        size: Number of elements, at most 2^62.
        seed: Non-negative integer.
        *purpose: Non-negative integers; each purpose has its own permutation for the same seed.

    Source: J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, section 3 (cycle walking) and
    section 5 (Feistel network); the round function is the finalizer of SplitMix64.
    """

    def __init__(self, size: int, seed: int, *purpose: int):
        assert 1 <= size <= 1 << 62, size
        self.size = size
        bits = max((size - 1).bit_length(), MIN_BITS)
        half = bits // 2
        self._shift = np.uint64(half)
        self._low = np.uint64((1 << half) - 1)
        self._high = np.uint64((1 << bits - half) - 1)
        self._keys = np.random.SeedSequence(seed, spawn_key=purpose).generate_state(ROUNDS, np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Give the elements at these places.

        Args:
            places: (n,) integers from 0 to `size` - 1.

        Returns:
            (n,) int64.
        """
        elements = np.asarray(places).astype(np.uint64)
        for start in range(0, len(elements), BLOCK):
            block = elements[start : start + BLOCK]
            block[:] = self._permute(block)
            outside = np.flatnonzero(block >= self.size)
            while len(outside):
                block[outside] = self._permute(block[outside])
                outside = outside[block[outside] >= self.size]
        return elements.view(np.int64)

    def _permute(self, numbers):
        high, low = numbers >> self._shift, numbers & self._low
        for first, second in self._keys.reshape(-1, 2):
            high ^= _mixed(low, first) & self._high
            low ^= _mixed(high, second) & self._low
        return high << self._shift | low


def _mixed(numbers, key):
    mixed = (numbers + key) * MULTIPLIERS[0]
    mixed ^= mixed >> SHIFT
    mixed *= MULTIPLIERS[1]
    mixed ^= mixed >> SHIFT
    return mixed
