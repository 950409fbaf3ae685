"""The same network in the layout of EuroBERT, a bidirectional Llama that transformers has since 5.3: there and back.

No number changes. NeoBERT groups the rows of q, k and v by head, EuroBERT has three matrices. NeoBERT rotates the pairs
(2i, 2i + 1) of a head, EuroBERT (i, i + K / 2), so the rows of q and k change places. NeoBERT has gate and up in one matrix.
The decoder of EuroBERT has a bias only together with the feed-forward layers (`mlp_bias`), whose biases are zeros.

Axes: `H` heads; `K` head width; `D` hidden; `F` feed-forward width.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from ..files.texts import printable
from .layouts import BLOCK, Checkpoint

if TYPE_CHECKING:
    from ..model.configuration_neobert import NeoBERTConfig

Tensors = dict[str, torch.Tensor]
MODEL_TYPE = "eurobert"
ARCHITECTURES = {
    "EuroBertModel": "NeoBERT",
    "EuroBertForMaskedLM": "NeoBERTLMHead",
    "EuroBertForTokenClassification": "NeoBERTForTokenClassification",
}
# Names of whole tensors, ours and theirs: outside the blocks, and inside. The classifier has the same name.
OUTSIDE = {
    "model.encoder.weight": "model.embed_tokens.weight",
    "model.layer_norm.weight": "model.norm.weight",
    "decoder.weight": "lm_head.weight",
    "decoder.bias": "lm_head.bias",
}
INSIDE = {
    "wo": "self_attn.o_proj",
    "ffn.w3": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
ATTENTION, GATES = [f"self_attn.{part}_proj" for part in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
SETTINGS = {  # names in config.json, ours and theirs
    "norm_eps": "rms_norm_eps",
    **{name: name for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    **{name: name for name in ("max_position_embeddings", "pad_token_id", "rope_parameters", "id2label", "label2id")},
}
FURTHER = ("tie_word_embeddings", "problem_type")  # read only, if they are there
# What EuroBertConfig has if config.json is silent, and what no export writes: other ways to say where positions are.
DEFAULTS = {"max_position_embeddings": 8192, "pad_token_id": 128001, "rms_norm_eps": 1e-5}
UNKNOWN = ("rope_theta", "rope_scaling", "original_max_position_embeddings", "partial_rotary_factor")
ROPE = ("default", "linear", "yarn")  # dynamic: EuroBERT scales by the longest text of a batch, NeoBERT by each text
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def settings_of(config: NeoBERTConfig) -> dict[str, Any]:
    """Return the arguments of `EuroBertConfig` for a NeoBERT, without dtype, architecture and ids of its tokenizer.

    Raises:
        ValueError: EuroBERT has no such rotary positions.
    """
    if (kind := config.rope_parameters["rope_type"]) not in ROPE:
        raise ValueError(
            f"rope_type={kind!r}: EuroBERT scales RoPE by the longest text of a batch, NeoBERT by each text; export to ONNX, or "
            "remove the scaling from config.json"
        )
    return {theirs: getattr(config, ours) for ours, theirs in SETTINGS.items()} | {
        "intermediate_size": config.swiglu_width,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "mlp_bias": True,
        "tie_word_embeddings": False,
    }


def as_eurobert(tensors: Tensors, num_heads: int) -> Tensors:
    """Return the tensors of EuroBERT; `tensors` have their published names. Those that are only renamed share their memory."""
    found = {}
    for name, tensor in tensors.items():
        if not (block := BLOCK.fullmatch(name)):
            found[OUTSIDE.get(name, name)] = tensor
            continue
        part = block[2].removesuffix(".weight")
        if part == "qkv":
            q_k_v = tensor.unflatten(0, (num_heads, 3, -1)).unbind(1)  # (H, K, D) each
            halves = [_pairs_to_halves(rows_HKD) for rows_HKD in q_k_v[:2]]
            parts = {new: rows.flatten(0, 1) for new, rows in zip(ATTENTION, (*halves, q_k_v[2]))}
        elif part == "ffn.w12":
            parts = dict(zip(GATES, tensor.chunk(2)))
        else:
            parts = {INSIDE[part]: tensor}
        for new, values in parts.items():
            found[f"model.layers.{block[1]}.{new}.weight"] = values.contiguous()
            if new.startswith("mlp."):
                found[f"model.layers.{block[1]}.{new}.bias"] = values.new_zeros(len(values))
    return found


def from_eurobert(checkpoint: Checkpoint, tensors: Tensors) -> tuple[Checkpoint, Tensors]:
    """Return a checkpoint of EuroBERT with the config of a NeoBERT, and its tensors by published names.

    A tensor that is missing, or has another shape than its neighbours, leaves out the one that would hold it.

    Raises:
        ValueError: It is another network than a NeoBERT.
    """
    given, folder = DEFAULTS | checkpoint.config, checkpoint.folder
    if not any(name.startswith("model.") for name in tensors):  # of EuroBertModel, which has no head
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    sizes: list[Any] = [given.get(name) for name in ("num_attention_heads", "hidden_size", "intermediate_size")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"config.json of {folder} lacks the sizes of a EuroBERT; download or copy it again")
    heads, hidden, width = sizes
    config = {ours: given[theirs] for ours, theirs in SETTINGS.items() if theirs in given}
    config |= {name: given[name] for name in FURTHER if name in given}
    named = given.get("architectures")
    architecture: Any = named[0] if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) else None
    rope = given.get("rope_parameters")
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    mixed = [name for name in tensors if BLOCK.fullmatch(name) or name in OUTSIDE]
    heads_of_encoder = [name for name in tensors if not name.startswith("model.") and architecture == "EuroBertModel"]
    groups, head_dim = given.get("num_key_value_heads"), given.get("head_dim")
    biases = [name for name, tensor in tensors.items() if ".mlp." in name and name.endswith(".bias") and tensor.any()]
    others = {
        f"architectures={architecture!r}": architecture not in ARCHITECTURES,
        f"num_key_value_heads={groups}": groups not in (None, heads),
        f"head_dim={head_dim}": head_dim not in (None, hidden // heads),
        f"hidden_act={given.get('hidden_act')!r}": given.get("hidden_act", "silu") != "silu",
        f"intermediate_size={width}, no multiple of 8": width % 8 != 0,
        f"rope_parameters={rope}": kind not in ROPE,
        **{f"{name}={given.get(name)!r}": given.get(name) is not None for name in UNKNOWN},
        f"the tensor {(mixed or heads_of_encoder or [''])[0]}": bool(mixed or heads_of_encoder),
        f"{(biases or [''])[0]} other than zeros": bool(biases),
    }
    if found := [printable(words) for words, is_other in others.items() if is_other]:
        raise ValueError(f"{folder} holds a EuroBERT with {', '.join(found)}, which NeoBERT has not; keep it as it is")
    config |= {
        "model_type": "neobert",
        "architectures": [ARCHITECTURES[architecture]],
        "intermediate_size": 3 * width // 2,
    }
    return checkpoint._replace(layout=MODEL_TYPE, config=config), _as_published(tensors, heads)


def _as_published(tensors: Tensors, num_heads: int) -> Tensors:
    theirs = {name: ours for ours, name in OUTSIDE.items()}
    whole, found, layers = {name: ours for ours, name in INSIDE.items()}, {}, {}
    for name, tensor in tensors.items():
        layer = LAYER.fullmatch(name)
        if layer and layer[3] == "bias" and layer[2] in (*GATES, "mlp.down_proj"):
            continue  # zeros
        if layer and layer[2] in whole:
            found[f"model.transformer_encoder.{layer[1]}.{whole[layer[2]]}.weight"] = tensor
        elif layer and layer[3] == "weight" and layer[2] in (*ATTENTION, *GATES):
            layers.setdefault(layer[1], {})[layer[2]] = tensor
        else:
            found[theirs.get(name, name)] = tensor
    for index, parts in layers.items():
        block = f"model.transformer_encoder.{index}."
        q_k_v, gates = ([parts[part] for part in kinds if part in parts] for kinds in (ATTENTION, GATES))
        shapes = {rows.shape for rows in q_k_v}
        is_whole = len(q_k_v) == 3 and len(shapes) == 1 and q_k_v[0].ndim == 2
        if is_whole and len(q_k_v[0]) % (2 * num_heads) == 0:
            q, k, v = (rows.unflatten(0, (num_heads, -1)) for rows in q_k_v)  # (H, K, D)
            rows_H3KD = torch.stack((_halves_to_pairs(q), _halves_to_pairs(k), v), 1)
            found[f"{block}qkv.weight"] = rows_H3KD.flatten(0, 2)
        if len(gates) == 2 and gates[0].shape == gates[1].shape and gates[0].ndim == 2:
            found[f"{block}ffn.w12.weight"] = torch.cat(gates)
    return found


def _pairs_to_halves(rows_HKD: torch.Tensor) -> torch.Tensor:
    """Move row 2i of each head to i, and row 2i + 1 to i + K / 2."""
    return rows_HKD.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _halves_to_pairs(rows_HKD: torch.Tensor) -> torch.Tensor:
    return rows_HKD.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
