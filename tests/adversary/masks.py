"""Random masks and packed batches on every CPU backend, compared with the oracle."""

import random
from pathlib import Path

import numpy as np
import torch
from adversary.machinery import RIGHT, Failed, Family
from adversary.workbench import Workbench
from oracle import CONFIG, Oracle, random_weights, write_checkpoint

from neobert_hf import NeoBERTForMaskedLM, inference_copy

KINDS = ("padding at any place", "4-D masks", "packed by several marks", "inference copies")
# Of the norm of a document's logits; float32 rounds, and its sums have another order than the oracle's.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
# Twice the largest of 5,565 documents: each of 13 products is 1 % off; median 0.019, largest 0.048.
INT8_TOLERANCE = 0.1
BACKENDS = ("auto", "sdpa", "eager")  # cpu_tiled is for bfloat16; the tests of the kernels have its tolerance


def prepare(bench: Workbench) -> tuple[list, dict]:
    """1,000 cases; they share the tiny model in both dtypes, its inference copies and the oracle."""
    weights = random_weights()
    checkpoint = write_checkpoint(bench.folder / "masks", weights)
    models = {dtype: NeoBERTForMaskedLM.from_pretrained(checkpoint, dtype=dtype).eval() for dtype in TOLERANCES}
    copies = [(inference_copy(models[torch.float32], int8), int8) for int8 in (False, True)]
    shared = {"models": models, "copies": copies, "oracle": Oracle(weights)}
    return [(KINDS[i % len(KINDS)], None) for i in range(1000)], shared


def case(kind: str, _, rng: random.Random, folder: Path, shared: dict) -> str:
    dtype, oracle = rng.choice(list(TOLERANCES)), shared["oracle"]
    model, tolerance = shared["models"][dtype], TOLERANCES[dtype]
    if kind == "inference copies":
        kind, dtype = rng.choice(list(BATCHES)), torch.float32
        model, is_int8 = rng.choice(shared["copies"])
        tolerance = INT8_TOLERANCE if is_int8 else TOLERANCES[dtype]
    backend = rng.choice(BACKENDS)
    model.config.unpad_inputs = rng.random() < 0.7
    model.config.sparse_prediction = False
    model.set_attn_implementation(backend)
    inputs, documents = BATCHES[kind](rng)
    is_label = {place: rng.random() < 0.5 for document in documents for place in document.places}
    is_label[documents[0].places[0]] = True
    labels = torch.full(inputs["input_ids"].shape, -100)
    for place, is_asked in is_label.items():
        labels[place] = rng.randrange(CONFIG["vocab_size"]) if is_asked else -100
    if rng.random() < 0.5:
        inputs["labels"] = labels
    try:
        with torch.set_grad_enabled(rng.random() < 0.3):
            outputs = model(**inputs)
    except ValueError as error:
        raise Failed(f"bug: {backend}, {dtype}: {error}") from error
    largest = 0.0
    for document in documents:
        expected = oracle.mlm_logits(oracle.encode(document.ids, document.positions)[2])
        found = torch.stack([outputs.logits[place] for place in document.places]).detach().double().numpy()
        largest = max(largest, np.linalg.norm(found - expected) / np.linalg.norm(expected))
    if not largest <= tolerance:
        raise Failed(f"silently wrong: the relative error of the logits is {largest:.1e} with {backend} in {dtype}")
    if "labels" in inputs:
        asked = [[int(labels[place]) for place in document.places] for document in documents]
        loss = oracle.mlm_loss([d.ids for d in documents], asked)
        has_holes = any((np.diff(d.positions) > 1).any() for d in documents)  # the oracle's loss has no such positions
        if not has_holes and not abs(outputs.loss.item() / loss - 1) <= min(10 * tolerance, INT8_TOLERANCE):
            raise Failed(f"silently wrong: the loss is {outputs.loss.item()}, not {loss}")
    return RIGHT


class Document:
    """Ids and positions of the tokens, and the place of each token in the batch: (row, column)."""

    def __init__(self, ids, row, columns):
        self.ids, self.places = ids, [(row, int(column)) for column in columns]
        self.positions = np.asarray(columns) - columns[0]  # a hole in the mask counts as a position


def random_ids(rng: random.Random, *shape: int) -> np.ndarray:
    return np.random.default_rng(rng.getrandbits(32)).integers(1, CONFIG["vocab_size"], shape)


def padded(rng):
    """Rows with padding on the right, on the left, or at any place."""
    num_rows, longest, side = rng.randint(1, 5), rng.randint(1, 24), rng.choice(("right", "left", "any"))
    ids, mask = random_ids(rng, num_rows, longest), np.zeros((num_rows, longest), bool)
    for row in mask:
        length = rng.randint(1, longest)
        row[{"right": slice(length), "left": slice(longest - length, longest)}.get(side, [])] = True
        row[rng.sample(range(longest), length) if side == "any" else []] = True
    if rng.random() < 0.5:
        ids[~mask] = 0  # the padding token; without this line, random tokens are the padding
    documents = [Document(row[real], i, np.flatnonzero(real)) for i, (row, real) in enumerate(zip(ids, mask))]
    dtype = rng.choice((torch.long, torch.bool, torch.int32, torch.float32))
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask).to(dtype)}, documents


def as_4d(rng):
    inputs, documents = padded(rng)
    mask = inputs["attention_mask"].bool()[:, None, None, :]
    if rng.random() < 0.5:
        mask = mask.expand(-1, 1, mask.shape[-1], -1)
    if rng.random() < 0.5:
        mask = torch.zeros(mask.shape).masked_fill(~mask, rng.choice((-torch.inf, torch.finfo(torch.float32).min)))
    return inputs | {"attention_mask": mask}, documents


def packed(rng):
    """One packed row, by a random choice of marks that agree."""
    lengths = [rng.choice((1, 2, 3, rng.randint(1, 40))) for _ in range(rng.randint(1, 8))]
    ids, ends = random_ids(rng, 1, sum(lengths)), np.cumsum(lengths)
    documents = [Document(ids[0, end - n : end], 0, np.arange(end - n, end)) for n, end in zip(lengths, ends)]
    boundaries = torch.tensor([0, *ends], dtype=rng.choice((torch.int32, torch.int64)))
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    marks = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "seq_idx": numbers % 2 if rng.random() < 0.5 else numbers,
        "cu_seq_lens_q": boundaries,
        "cu_seqlens": boundaries.clone(),
    }
    chosen = rng.sample(list(marks), rng.randint(1, len(marks)))
    inputs = {"input_ids": torch.from_numpy(ids), **{name: marks[name] for name in chosen}}
    if chosen == ["position_ids"]:
        inputs["position_ids"] += rng.choice((0, 0, 2))  # RoBERTa's positions begin at 2
        if rng.random() < 0.5:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if chosen == ["cu_seq_lens_q"] and rng.random() < 0.5:
        inputs |= {"max_length_q": max(lengths), "trust_boundaries": rng.random() < 0.5}
    return inputs, documents


BATCHES = dict(zip(KINDS, (padded, as_4d, packed)))
MASKS = Family("masks", prepare, case)
