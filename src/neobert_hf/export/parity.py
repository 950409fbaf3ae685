"""The comparison of an exported file with torch, before the file is handed over.

Float files are compared on eight batches of random tokens: padding on either side, one row, one column, and lengths that the
exporter has not seen. Files in int8 are compared on texts, because random tokens say little about rounding: documentation, lines
of code, tables, paths and numbers, whose activations are the largest, and words of the tokenizer's own vocabulary, since a
tokenizer of other texts reads the rest as unknown tokens.

Axes: `B` rows, `L` columns.
"""

from __future__ import annotations

import builtins
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .graphs import MULTI_VECTOR, SPARSE, Graph
from .onnx_model import Arrays, Run

Batches = dict[str, Arrays]  # inputs by name of a batch

LONG = 512  # tokens; runtimes differ more in sums over so many, and the batch "1 x 512" has a limit of its own
# The largest difference by kind and batch: the error over the largest value, and for int8 one less the cosine of a text.
# In float16, torch itself differs by up to 1e-2, and runtimes round at other places.
LIMITS = {
    ("float32", "all"): 1e-5,
    ("float32", "1 x 512"): 1e-4,
    ("float16", "all"): 3e-2,
    ("int8", "all"): 0.005,
    ("int8", "known words"): 0.02,
    ("int8", "random tokens"): 0.05,
}
# How many times wider the limits of int8 are: errors of a maximum do not cancel, and a token has a cosine of its own.
# The logits of masked words pass one more layer in int8, the decoder.
WIDER = {("int8", "fill-mask"): 2, ("int8", SPARSE): 2, ("int8", MULTI_VECTOR): 4}
NUM_TEXTS, TEXT_TOKENS = 32, 64
NUM_LINES = 320
# Names in these lines. They do not depend on the version of Python or of this library: a file is compared on the same lines.
NAMES = [
    "argparse",
    "asyncio",
    "base64",
    "collections",
    "contextlib",
    "dataclasses",
    "datetime",
    "functools",
    "hashlib",
    "importlib",
    "itertools",
    "json",
    "logging",
    "multiprocessing",
    "pathlib",
    "platform",
    "sqlite3",
    "subprocess",
    "threading",
    "unicodedata",
    "xml",
]
KNOWN = 0.5  # least share of known tokens in a text that says something


class Reference:
    """What torch computes for the inputs of the comparison, while the network of the graph is in float32.

    Attributes:
        batches: The random batches by name.
        wanted: The outputs of torch for each of them, in the order of the graph.

    Args:
        graph: The graph that is exported.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.run_torch = torch_runner(graph)
        config = graph.model.config
        self.longest = min(LONG, graph.longest)
        self.batches = random_batches(config.vocab_size, config.pad_token_id or 0, self.longest)
        self.wanted = {name: self._real_values(batch, self.run_torch(batch)) for name, batch in self.batches.items()}

    @cached_property
    def texts(self) -> dict[str, Batches]:
        """The batches for int8 by material: texts, or random tokens if the tokenizer is missing or reads no text."""
        texts = {}
        if self.graph.tokenizer:
            texts = text_batches(self.graph.tokenizer, min(TEXT_TOKENS, self.longest))
        return texts or {"random tokens": self.batches}

    def check(self, file: Path, run: Run, kind: str) -> dict:
        """Compare a file with torch.

        Args:
            file: The file, for the message.
            run: Computes the outputs of the file.
            kind: "float32", "float16" or "int8".

        Returns:
            `errors`, the largest error over the largest value by batch; for int8 `smallest_cosine`, and that by material.

        Raises:
            ValueError: The file differs more than its limit.
        """
        if kind == "int8":
            differences = self._differences_of_texts(run)
            unit = "in one less the cosine, on"
        else:
            differences = self._errors(run)
            unit = "of the largest value, in the batch"
        for name, difference in differences.items():
            limit = LIMITS.get((kind, name)) or LIMITS[kind, "all"]
            limit *= WIDER.get((kind, self.graph.task), 1)
            if not difference <= limit:  # also if it is not a number
                fact = f"{file.name} differs from torch by {difference:.1e} {unit} '{name}', more than {limit}"
                raise ValueError(f"{fact}; update torch and the runtime, or export in float32")
        if kind != "int8":
            return {"errors": {name: float(f"{error:.2g}") for name, error in differences.items()}}
        cosines = {name: round(1 - difference, 5) for name, difference in differences.items()}
        return {"smallest_cosine": min(cosines.values()), "compared_on": cosines}

    def _real_values(self, batch: Arrays, found: Arrays) -> list[np.ndarray]:
        """The outputs in the order of the graph, with zeros at padding, whose values mean nothing."""
        is_real_BL = batch["attention_mask"] != 0
        outputs = []
        for name in self.graph.outputs:
            values = found[name]
            if name in ("start_logits", "end_logits"):
                values = np.where(is_real_BL, values, 0)
            elif values.ndim == 3:
                values = np.where(is_real_BL[..., None], values, 0)
            outputs.append(values)
        return outputs

    def _errors(self, run: Run) -> dict[str, float]:
        """The largest error by batch, over the largest value of all batches: the logits of one may be near zero."""
        scales = [max(np.abs(values).max() for values in output) for output in zip(*self.wanted.values())]
        errors = {}
        for name, batch in self.batches.items():
            outputs = zip(self._real_values(batch, run(batch)), self.wanted[name], scales)
            errors[name] = max(float(np.abs(a - b).max() / scale) for a, b, scale in outputs)
        return errors

    def _differences_of_texts(self, run: Run) -> dict[str, float]:
        """One less the smallest cosine of a text by material; for the few logits of a classifier, that over all texts.

        Of a multi-vector model it is that of a token.
        """
        differences = {}
        for material, batches in self.texts.items():
            # of products and squares, for each text; masks, which come last, are no numbers
            sums = [[] for name in self.graph.outputs if not name.endswith("mask")]
            for batch in batches.values():
                found = self._real_values(batch, run(batch))
                wanted = self._real_values(batch, self.run_torch(batch))  # not kept: logits of all texts are gigabytes
                for output, a, b in zip(sums, found, wanted):
                    if self.graph.task == MULTI_VECTOR:
                        is_real_BL = batch["attention_mask"] != 0
                        a = a[is_real_BL]
                        b = b[is_real_BL]
                    a = a.reshape(len(a), -1)
                    b = b.reshape(len(b), -1)
                    output.append([(a * b).sum(1), (a * a).sum(1), (b * b).sum(1)])
            sums = np.array([np.concatenate(output, axis=1) for output in sums])
            if self.graph.task == "text-classification":
                sums = sums.sum(2, keepdims=True)
            differences[material] = float(1 - (sums[:, 0] / np.sqrt(sums[:, 1] * sums[:, 2])).min())
        return differences


def torch_runner(graph: Graph) -> Run:
    """Return a function that computes the outputs of a graph with torch."""

    def run(batch: Arrays) -> Arrays:
        with torch.inference_mode():
            found = graph(**{name: torch.from_numpy(values) for name, values in batch.items()})
        return {name: values.numpy() for name, values in zip(graph.outputs, found)}

    return run


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
        is_real = np.arange(lengths.max()) < lengths[:, None]
        if pads_left:
            is_real = is_real[:, ::-1]
        ids = np.where(is_real, generator.integers(0, vocab_size, is_real.shape), pad_id)
        batches[name] = {"input_ids": ids.astype(np.int64), "attention_mask": is_real.astype(np.int64)}
    return batches


def text_batches(tokenizer: PreTrainedTokenizerBase, longest: int) -> dict[str, Batches]:
    """Return batches of eight texts by material and first text; a text of mostly unknown tokens says nothing and is left out.

    The documentation is that of Python's built-in names, which every machine has. The known words are tokens of the vocabulary,
    drawn at random and joined to texts. The lines are those of `short_lines`.

    Args:
        tokenizer: The tokenizer of the model.
        longest: Length in tokens at which texts are cut.
    """
    generator = np.random.default_rng(0)
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    documentation = [value.__doc__ for _, value in sorted(vars(builtins).items()) if getattr(value, "__doc__", None)]
    materials = {
        "documentation": documentation[:NUM_TEXTS],
        "lines": short_lines(generator),
        "known words": [tokenizer.decode(generator.choice(ids, TEXT_TOKENS // 4)) for _ in range(NUM_TEXTS)],
    }
    options = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "np"}
    options["return_token_type_ids"] = False
    batches: dict[str, Batches] = {}
    for material, texts in materials.items():
        known = [text for text in texts if _known_share(tokenizer, text, longest) >= KNOWN]
        for start in range(0, len(known), 8):
            batch = tokenizer(known[start : start + 8], **options)
            batches.setdefault(material, {})[f"{material} {start}"] = dict(batch)
    return batches


def short_lines(generator: np.random.Generator) -> list[str]:
    """Return `NUM_LINES` lines: code, rows of tables, paths and numbers, a quarter of the lines each."""
    lines = []
    for _ in range(NUM_LINES // 4):
        one, two, three = generator.choice(NAMES, 3)
        numbers = generator.normal(0, 1000, 8)
        lines.append(f"def {one}_{two}(self, {three}: int = {numbers[3]:.0f}) -> {one}.{two.title()}:")
        lines.append(f"| {one} | {numbers[0]:.3f} | {numbers[1]:,.0f} | `{two}.{three}()` |")
        lines.append(f"/usr/lib/{one}/{two}-{numbers[2]:.1f}/{three}.so")
        lines.append(" ".join(f"{number:.3g}" for number in numbers))
    return lines


def _known_share(tokenizer: PreTrainedTokenizerBase, text: str, longest: int) -> float:
    """The share of known tokens among those of the text, without the special ones around it."""
    ids = tokenizer(text, truncation=True, max_length=longest, add_special_tokens=False)["input_ids"]
    return 1 - ids.count(tokenizer.unk_token_id) / max(len(ids), 1)
