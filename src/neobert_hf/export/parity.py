"""The comparison of an exported file with torch, before the file is handed over.

Float files are compared on eight batches of random tokens: padding on either side, one row, one column, and lengths that the
exporter has not seen. Files in int8 are compared on real texts, because random tokens say little about rounding, if the
model has a tokenizer.

Axes: `B` rows, `L` columns.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .graphs import Graph

Arrays = dict[str, np.ndarray]
Answers = tuple[Arrays, list[np.ndarray]]  # inputs by name, and the outputs of torch
Run = Callable[[Arrays], Sequence[np.ndarray]]  # inputs by name to the outputs of the graph, in its order

LONG = 512  # tokens; runtimes differ more in sums over so many
# Largest error over largest value: in batches shorter than LONG, and in the others.
# In float16, torch itself differs by up to 1e-2, and runtimes round at other places.
LIMITS = {"float32": (1e-5, 1e-4), "float16": (3e-2, 3e-2)}
SMALLEST_COSINE = {"texts": 0.995, "random tokens": 0.95}  # of an int8 file
NUM_TEXTS, TEXT_TOKENS = 32, 64  # the logits of a masked language model are 250 MB


class Reference:
    """What torch computes for the inputs of the comparison, while the network of the graph is in float32.

    Attributes:
        batches: The random batches by name.

    Args:
        graph: The graph that is exported.

    Raises:
        ValueError: The outputs hold NaN or infinity.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        config = graph.model.config
        self.longest = min(LONG, graph.longest, config.max_position_embeddings)
        inputs = random_batches(config.vocab_size, config.pad_token_id or 0, self.longest)
        self.batches = {name: (batch, self._compute(batch)) for name, batch in inputs.items()}

    @cached_property
    def texts(self) -> list[Answers]:
        """Real texts, or the random batches if the model has no tokenizer."""
        if self.graph.tokenizer is None:
            return list(self.batches.values())
        return [(batch, self._compute(batch)) for batch in text_batches(self.graph.tokenizer, self.longest)]

    def check(self, file: Path, run: Run, kind: str) -> dict:
        """Compare a file with torch.

        Args:
            file: The file, for the message.
            run: Computes the outputs of the file.
            kind: "float32", "float16" or "int8".

        Returns:
            `errors`, the largest error over the largest value by batch; for int8 `smallest_cosine`.

        Raises:
            ValueError: The file differs more than its limit.
        """
        if kind == "int8":
            material = "texts" if self.graph.tokenizer else "random tokens"
            cosine, limit = self._smallest_cosine(run), SMALLEST_COSINE[material]
            if not cosine >= limit:  # also if it is not a number
                raise ValueError(
                    f"{file.name} has a cosine of {cosine:.4f} with torch on {material}, less than {limit}; export "
                    "in float32"
                )
            return {"smallest_cosine": round(cosine, 5), "compared_on": material}
        errors = self._errors(run)
        for name, error in errors.items():
            limit = LIMITS[kind][self.batches[name][0]["input_ids"].shape[1] >= LONG]
            if not error <= limit:
                remedy = "export in float32" if kind == "float16" else "update torch and the runtime"
                raise ValueError(
                    f"{file.name} differs from torch by {error:.1e} of the largest value in the batch '{name}', more than "
                    f"{limit}; {remedy}"
                )
        return {"errors": {name: float(f"{error:.2g}") for name, error in errors.items()}}

    def _compute(self, batch: Arrays) -> list[np.ndarray]:
        with torch.inference_mode():
            found = self.graph.reference(**{name: torch.from_numpy(values) for name, values in batch.items()})
        wanted = self._without_padding(batch, [output.numpy() for output in found])
        if not all(np.isfinite(values).all() for values in wanted):
            source = self.graph.model.config.name_or_path
            raise ValueError(
                f"the outputs of torch hold NaN or infinity, so the weights may too; examine them: neobert doctor {source}"
            )
        return wanted

    def _without_padding(self, batch: Arrays, found: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs with zeros at padding, whose values mean nothing."""
        is_real_BL = batch["attention_mask"] != 0
        return [
            np.where(is_real_BL.reshape(*is_real_BL.shape, *[1] * (values.ndim - 2)), values, 0)
            if values.ndim == 3 or name in ("start_logits", "end_logits")
            else values
            for name, values in zip(self.graph.outputs, found)
        ]

    def _errors(self, run: Run) -> dict[str, float]:
        """The largest error by batch, over the largest value of all batches: the logits of one may be near zero."""
        by_output = zip(*(wanted for _, wanted in self.batches.values()))
        scales = [max(np.abs(values).max() for values in output) for output in by_output]
        errors = {}
        for name, (batch, wanted) in self.batches.items():
            triples = zip(self._without_padding(batch, run(batch)), wanted, scales)
            errors[name] = max(float(np.abs(a - b).max() / scale) for a, b, scale in triples)
        return errors

    def _smallest_cosine(self, run: Run) -> float:
        """The smallest cosine of an output for a text; for the few logits of a classifier, that over all texts."""
        sums = [[] for _ in self.graph.outputs]  # of products and squares, for each text
        for batch, wanted in self.texts:
            for output, a, b in zip(sums, self._without_padding(batch, run(batch)), wanted):
                a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
                output.append([(a * b).sum(1), (a * a).sum(1), (b * b).sum(1)])
        sums = np.array([np.concatenate(output, axis=1) for output in sums])
        if self.graph.task == "text-classification":
            sums = sums.sum(2, keepdims=True)
        return float((sums[:, 0] / np.sqrt(sums[:, 1] * sums[:, 2])).min())


def random_batches(vocab_size: int, pad_id: int, longest: int) -> dict[str, Arrays]:
    """Return eight batches of random tokens by name; none has the shape of the exporter's example.

    Args:
        vocab_size: Ids are below this.
        pad_id: Id of padding.
        longest: Length in tokens of the longest sequence.
    """
    shapes = {
        "5 ragged, padding right": ([3, 17, 40, 9, 1], False),
        "5 ragged, padding left": ([3, 17, 40, 9, 1], True),
        "2 long, padding left": ([200, 37], True),
        "7 x 33": ([33] * 7, False),
        "1 x 1": ([1], False),
        "1 x 64": ([64], False),
        "6 x 1": ([1] * 6, False),
        f"1 x {longest}": ([longest], False),
    }
    generator = np.random.default_rng(0)
    batches = {}
    for name, (lengths, pads_left) in shapes.items():
        lengths = np.minimum(lengths, longest)
        columns = np.arange(lengths.max())
        is_real = columns < lengths[:, None]
        is_real = is_real[:, ::-1] if pads_left else is_real
        ids = np.where(is_real, generator.integers(0, vocab_size, is_real.shape), pad_id)
        batches[name] = {"input_ids": ids.astype(np.int64), "attention_mask": is_real.astype(np.int64)}
    return batches


def text_batches(tokenizer: PreTrainedTokenizerBase, longest: int) -> list[Arrays]:
    """Return batches of eight real texts, the documentation of Python's built-in names, which every machine has."""
    texts = [value.__doc__ for _, value in sorted(vars(builtins).items()) if getattr(value, "__doc__", None)][
        :NUM_TEXTS
    ]
    options = {"padding": True, "truncation": True, "max_length": min(TEXT_TOKENS, longest), "return_tensors": "np"}
    batches = [tokenizer(texts[start : start + 8], **options) for start in range(0, len(texts), 8)]
    return [{name: batch[name].astype(np.int64) for name in ("input_ids", "attention_mask")} for batch in batches]
