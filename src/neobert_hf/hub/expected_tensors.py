"""Which tensors a NeoBERT has, by its config or by the sizes of the tensors themselves."""

import re

from ..model.configuration_neobert import NeoBERTConfig
from .layouts import StoredTensor

BLOCK = re.compile(r"model\.transformer_encoder\.(\d+)\.(.+)")


def stored_sizes(tensors: dict[str, StoredTensor]) -> dict[str, int]:
    """Return the sizes of the model as its tensors have them, by the names in the config."""
    sizes = {}
    embedding = tensors.get("model.encoder.weight")
    if embedding and len(embedding.shape) == 2:
        sizes["vocab_size"], sizes["hidden_size"] = embedding.shape
    blocks = [BLOCK.fullmatch(name) for name in tensors]
    last = max((int(found[1]) for found in blocks if found), default=-1)
    sizes["num_hidden_layers"] = min(1 + last, len(tensors))  # the number in a name may be any
    widths = [
        tensor.shape[1] for name, tensor in tensors.items() if name.endswith(".ffn.w3.weight") and tensor.shape[1:]
    ]
    if widths:
        sizes["swiglu_width"] = max(set(widths), key=widths.count)
    return sizes


def expected_shapes(config: NeoBERTConfig, sizes: dict[str, int], is_split: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name, with the head that the config names.

    Args:
        config: The config.
        sizes: As of `stored_sizes`; they come before those of the config.
        is_split: Gate and up are separate tensors.
    """
    vocab, hidden = sizes.get("vocab_size", config.vocab_size), sizes.get("hidden_size", config.hidden_size)
    width = sizes.get("swiglu_width", config.swiglu_width)
    block = {"attention_norm": (hidden,), "qkv": (3 * hidden, hidden), "wo": (hidden, hidden), "ffn_norm": (hidden,)}
    block |= {"ffn.w1": (width, hidden), "ffn.w2": (width, hidden)} if is_split else {"ffn.w12": (2 * width, hidden)}
    block["ffn.w3"] = (hidden, width)
    shapes = {"model.encoder.weight": (vocab, hidden), "model.layer_norm.weight": (hidden,)}
    for i in range(sizes["num_hidden_layers"]):
        shapes |= {f"model.transformer_encoder.{i}.{name}.weight": shape for name, shape in block.items()}
    for name, rows in head_layers(config, vocab, hidden).items():
        shapes |= {f"{name}.weight": (rows, hidden), f"{name}.bias": (rows,)}
    return shapes


def head_layers(config: NeoBERTConfig, vocab: int, hidden: int) -> dict[str, int]:
    """Return the layers of the head that the config names, with their numbers of outputs."""
    architecture = str((config.architectures or [""])[0])
    if architecture in ("NeoBERTLMHead", "NeoBERTForMaskedLM"):
        return {"decoder": vocab}
    if architecture == "NeoBERTForQuestionAnswering":
        return {"qa_outputs": 2}
    rows = 1 if architecture == "NeoBERTForMultipleChoice" else config.num_labels
    dense = {} if architecture == "NeoBERTForTokenClassification" else {"dense": hidden}
    is_classifier = re.fullmatch(r"NeoBERTFor(Sequence|Token)Classification|NeoBERTForMultipleChoice", architecture)
    return dense | {"classifier": rows} if is_classifier else {}
