"""The same network in the layout of EuroBERT, a bidirectional Llama that transformers has since 5.3: there and back.

`convert` reads such a folder, and `export_model` writes one, the twin of a model, and compares it.

No number changes. NeoBERT groups the rows of q, k and v by head, EuroBERT has three matrices. NeoBERT rotates the pairs
(2i, 2i + 1) of a head, EuroBERT (i, i + K / 2), so the rows of q and k change places. NeoBERT has gate and up in one matrix.
The decoder of EuroBERT has a bias only together with the feed-forward layers (`mlp_bias`), whose biases are zeros.

Axes: `H` heads; `K` head width; `D` hidden; `F` feed-forward width.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from ..files.texts import printable
from ..files.writing import replacing
from ..runs.record import CARD_WRITER
from .card import CARD, write_card
from .layouts import BLOCK, FLOATS, WEIGHTS, Checkpoint, read_config, read_header

if TYPE_CHECKING:  # transformers before 5.3 has no EuroBERT
    from transformers import EuroBertConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..model.modeling_neobert import NeoBERTPreTrainedModel

Tensors = dict[str, torch.Tensor]
MODEL_TYPE = "eurobert"
ARCHITECTURES = {
    "EuroBertModel": "NeoBERT",
    "EuroBertForMaskedLM": "NeoBERTLMHead",
    "EuroBertForTokenClassification": "NeoBERTForTokenClassification",
}
# The classes of twins by the task of a model, as the Hub names it.
TWINS = {
    "feature-extraction": "EuroBertModel",
    "fill-mask": "EuroBertForMaskedLM",
    "token-classification": "EuroBertForTokenClassification",
    "sentence-similarity": "EuroBertModel",
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


def twin_config(model: NeoBERTPreTrainedModel, task: str, tokenizer: PreTrainedTokenizerBase | None) -> EuroBertConfig:
    """Return the config of the twin of a model.

    Args:
        model: The model.
        task: Its task, as the Hub names it.
        tokenizer: Its tokenizer, for the ids of special tokens.

    Raises:
        ValueError: transformers has no EuroBERT with such a head, or EuroBERT has no such rotary positions.
    """
    config, mask_id = model.config, getattr(tokenizer, "mask_token_id", None)
    if task not in TWINS:
        fault = f"transformers has no EuroBERT for {task}"
        if task == "text-classification":
            fault = "the head of EuroBERT for classes has GELU where this one has tanh or none"
        raise ValueError(f"{fault}; export to ONNX, or the encoder alone: task=feature-extraction")
    if (kind := config.rope_parameters["rope_type"]) not in ROPE:
        raise ValueError(
            f"rope_type={kind!r}: EuroBERT scales RoPE by the longest text of a batch, NeoBERT by each text; export to ONNX, or "
            "remove the scaling from config.json"
        )
    return transformers.EuroBertConfig(
        **{theirs: getattr(config, ours) for ours, theirs in SETTINGS.items()},
        intermediate_size=config.swiglu_width,
        num_key_value_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        hidden_act="silu",
        mlp_bias=True,
        tie_word_embeddings=False,
        bos_token_id=getattr(tokenizer, "bos_token_id", None),  # as Trainer would set them
        eos_token_id=getattr(tokenizer, "eos_token_id", None),
        # The default is an id of EuroBERT's own vocabulary. Without a mask token, it is an id that exists.
        mask_token_id=(config.pad_token_id or 0) if mask_id is None else mask_id,
        architectures=[TWINS[task]],
    )


def save_twin(model: NeoBERTPreTrainedModel, config: EuroBertConfig, origin: Path, folder: Path) -> torch.dtype:
    """Write the weights and the config of the twin of a model, and return the dtype of the weights.

    It is that of the tensors in the files of the model: float32 for several, for float64 and for pickles. The config has the
    dtype in which that of the model asks to load it, which may be wider: the mini model is stored in bfloat16.

    Args:
        model: The model.
        config: The config of its twin, whose dtype is set.
        origin: Folder of the model.
        folder: Folder to fill.
    """
    place = origin if (origin / "config.json").is_file() else origin / "0_Transformer"
    headers = [read_header(file).values() for file in sorted(place.glob("*.safetensors"))]
    kinds = {tensor.dtype for header in headers for tensor in header}
    dtype, stored = FLOATS[kinds.pop()] if kinds in ({"BF16"}, {"F16"}) else torch.float32, read_config(place)
    names = {str(each).removeprefix("torch."): each for each in FLOATS.values()}
    config.dtype = names.get(str(stored.get("dtype") or stored.get("torch_dtype")), dtype)
    prefix = "model." if config.architectures == ["EuroBertModel"] else ""
    published = {f"{prefix}{name}": tensor.to(dtype) for name, tensor in model.state_dict().items()}
    tensors = as_eurobert(published, config.num_attention_heads)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
    return dtype


def open_twin(config: EuroBertConfig, folder: Path, **options) -> PreTrainedModel:
    """Open a folder of `save_twin` in the class of its config; `options` are arguments of `from_pretrained`."""
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, **options)


def write_card_of_twin(source: str, origin: Path, folder: Path) -> None:
    """Write the card of the twin, with licence and language of the model, and its id on the Hub as the base model.

    Args:
        source: Folder or Hub id of the model.
        origin: Its folder.
        folder: Folder of the twin.
    """
    is_local = Path(source).is_dir()
    try:
        known = ModelCard.load(origin / CARD if is_local else source, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, yaml.YAMLError):  # none, or damaged: the new card says what is not known
        known = {}
    with replacing(folder / CARD, writer=CARD_WRITER):  # whose later call may replace it
        write_card(folder, folder.name, known.get("license"), known.get("language"), record_folder=origin)
        card = ModelCard.load(folder / CARD)
        card.data.tags = ["neobert", *card.data.tags]
        if not is_local:
            card.data.base_model, card.data.base_model_relation = source, "finetune"
        what = "A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)) in the layout of EuroBERT: the same numbers, "
        what += "read by transformers 5.3 and later without remote code."
        card.text = card.text.replace("## How to use", f"{what}\n\n## How to use", 1)
        card.save(folder / CARD)


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
