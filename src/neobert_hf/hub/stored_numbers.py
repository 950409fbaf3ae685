"""The numbers of stored tensors, read a part at a time: what no training gives, and what changed since another checkpoint."""

import math
from collections.abc import Iterator

import numpy as np

from .layouts import StoredTensor

PART = 1 << 18  # numbers that are read at a time

# For each type of float in safetensors: the integer of the same width, and the bits of infinity; the first bit is the sign.
FLOATS = {
    "F64": (np.uint64, 0x7FF0000000000000),
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}
# Relative change of a tensor by rounding it twice, at most.
ROUNDING = {"F64": 1e-9, "F32": 1e-6, "BF16": 3e-3, "F16": 4e-4}
LARGEST = 1e5  # trained weights are smaller by far; one changed bit of the exponent makes 0.02 a number near 1e36


def odd_values(tensor: StoredTensor) -> set[str]:
    """Return which of nan, infinity and huge a tensor of floats holds.

    The bits of a float without its sign, read as an integer, have the order of the sizes; infinity is the last, then NaN.
    """
    if tensor.dtype not in FLOATS:
        return set()
    kinds, (integer, infinity) = set(), FLOATS[tensor.dtype]
    huge = largest_bits(tensor.dtype)
    for part in parts(tensor):
        part &= integer(np.iinfo(integer).max >> 1)
        top = int(part.max())
        if top > infinity:
            kinds.add("nan")
            top = int(part[part <= infinity].max(initial=0))  # the largest one beside NaN
        if top == infinity:
            kinds.add("infinity")
        elif top > huge:
            kinds.add("huge")
    return kinds


def largest_bits(dtype: str) -> int:
    """Return the bits of LARGEST; float16 ends before it."""
    if dtype in ("F32", "F64"):
        return int(np.array(LARGEST, np.float32 if dtype == "F32" else np.float64).view(FLOATS[dtype][0]))
    return int(np.array(LARGEST, np.float32).view(np.uint32) >> 16) if dtype == "BF16" else FLOATS[dtype][1]


def parts(tensor: StoredTensor) -> Iterator[np.ndarray]:
    """Read the bits of a tensor, a part at a time."""
    integer = np.dtype(FLOATS[tensor.dtype][0])
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        for left in range((tensor.end - tensor.start) // integer.itemsize, 0, -PART):
            yield np.fromfile(stream, integer, min(left, PART))


def changes_of_rows(own: StoredTensor, other: StoredTensor, heads: int) -> list[float]:
    """Return the relative change of the rows of q, k and v, up to a common factor. Rows are grouped by head: q, k, v."""
    pairs = zip(*(read_floats(each).reshape(heads, 3, -1).swapaxes(0, 1).reshape(3, -1) for each in (own, other)))
    changes = []
    for new, old in pairs:
        square = float(old @ old) or 1.0
        rest = new - float(new @ old) / square * old
        changes.append(math.sqrt(float(rest @ rest) / square))
    return changes


def read_floats(tensor: StoredTensor) -> np.ndarray:
    """Read a tensor as float32."""
    bits = np.concatenate(list(parts(tensor)))
    if tensor.dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view({"F64": np.float64, "F32": np.float32, "F16": np.float16}[tensor.dtype]).astype(np.float32)
