"""Random texts, formats and contexts of the contextual model, compared with single texts in a context that is given each time."""

import random
from pathlib import Path

import torch
from adversary.machinery import EXPLAINED, RIGHT, Failed, Family
from adversary.masks import BATCHES
from adversary.workbench import Workbench
from oracle import random_weights, write_checkpoint

from neobert_hf import ContextualNeoBERTModel, NeoBERTModel

FORMATS = [name for name in BATCHES if name != "4-D masks"]
SIZE = 4  # context vectors of the model as it was made
TOLERANCE = 1e-10  # float64: sums in another order


def prepare(bench: Workbench) -> tuple[list, dict]:
    """300 cases; they share two equal models in float64, whose two stages differ."""
    encoder = NeoBERTModel.from_pretrained(
        write_checkpoint(bench.folder / "contexts", random_weights()), dtype=torch.float64
    )
    models = [ContextualNeoBERTModel.from_encoder(encoder, context_size=SIZE).eval() for _ in range(2)]
    with torch.no_grad():
        for parameter in models[0].first_stage.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    models[1].load_state_dict(models[0].state_dict())
    cases = [("contextual inputs", FORMATS[i % len(FORMATS)]) for i in range(300)]
    return cases, dict(zip(("model", "reference"), models))


def case(kind: str, batch_format: str, rng: random.Random, folder: Path, shared: dict) -> str:
    """Change the context at random, then embed a random batch, which may contradict itself."""
    model, reference = shared["model"], shared["reference"]
    torch.manual_seed(rng.getrandbits(32))
    model.config.unpad_inputs = rng.random() < 0.7
    context = None
    for _ in range(rng.randint(0, 4)):
        context = change_context(model, context, rng)
    inputs, documents = BATCHES[batch_format](rng)
    inputs.pop("trust_boundaries", None)
    inputs["embeds_context"] = rng.random() < 0.3
    is_contradictory = rng.random() < 0.2 and contradict(inputs, len(documents), rng)
    try:
        with torch.no_grad():
            found = model(**inputs).sentence_embedding
    except ValueError as error:
        if is_contradictory:
            return EXPLAINED
        raise Failed(f"bug: {error}") from error
    if is_contradictory:
        raise Failed(f"silently wrong: {sorted(inputs)} contradict one another")
    if len(found) != len(documents):
        raise Failed(f"silently wrong: {len(found)} embeddings of {len(documents)} texts")
    reference.config.context_size = SIZE if context is None else len(context)
    for document, vector in zip(documents, found):
        text = torch.from_numpy(document.ids)[None]
        alone = {"attention_mask": torch.ones_like(text), "position_ids": torch.from_numpy(document.positions)}
        with torch.no_grad():
            expected = reference(text, **alone, dataset_embeddings=context, embeds_context=inputs["embeds_context"])
        error = (vector - expected.sentence_embedding[0]).abs().max() / expected.sentence_embedding.abs().max()
        if not error <= TOLERANCE:
            raise Failed(f"silently wrong: the relative error of an embedding is {error:.1e}")
    return RIGHT


def change_context(model, context, rng):
    """Set a context of any size, remove it, or offer one that must be refused; returns the context afterwards."""
    action = rng.choice(("set", "remove", "refuse"))
    vectors = torch.randn(rng.randint(1, 2 * SIZE), model.config.hidden_size, dtype=torch.float64)
    if action == "refuse":
        vectors[rng.randrange(len(vectors)), 3] = rng.choice((torch.nan, torch.inf))
        vectors = rng.choice((vectors, vectors[:, 1:], vectors[:0], vectors[0]))
        try:
            model.set_context(vectors)
        except ValueError:
            return context
        raise Failed(f"silently wrong: a context of shape {tuple(vectors.shape)} with {vectors.sum()} is accepted")
    context = vectors if action == "set" else None
    model.set_context(context)
    return context


def contradict(inputs: dict, num_texts: int, rng: random.Random) -> bool:
    """Change the inputs so that they contradict one another; False if they still agree, because the row is one text."""
    name = next((name for name in ("cu_seq_lens_q", "cu_seqlens") if name in inputs), None)
    if name is not None and rng.random() < 0.5:
        inputs[name] = rng.choice((inputs[name] + 1, inputs[name] - 1))
        return True
    one_text = torch.zeros_like(inputs["input_ids"])
    if "seq_idx" in inputs:
        inputs["position_ids"] = torch.arange(one_text.shape[1])
    else:
        inputs["seq_idx"] = one_text
    return num_texts > 1 or "attention_mask" in inputs


CONTEXTS = Family("contexts", prepare, case)
