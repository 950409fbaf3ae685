"""The same network in the layout of EuroBERT, a bidirectional Llama that transformers has since 5.3.

`export_model` writes such a folder, the twin of a model, and compares it.

No number changes. NeoBERT groups the rows of q, k and v by head, EuroBERT has three matrices. NeoBERT rotates the pairs
(2i, 2i + 1) of a head, EuroBERT (i, i + K / 2), so the rows of q and k change places. NeoBERT has gate and up in one matrix.
The decoder of EuroBERT has a bias only together with the feed-forward layers (`mlp_bias`), whose biases are zeros.

Axes: `H` heads; `K` head width; `D` hidden; `F` feed-forward width.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from .card import CARD, write_card
from .network import BLOCK, FLOATS
from .saved_model import WEIGHTS, SavedModel

if TYPE_CHECKING:  # transformers before 5.3 has no EuroBERT
    from transformers import EuroBertConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..model.modeling_neobert import NeoBERTPreTrainedModel

Tensors = dict[str, torch.Tensor]
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
ROPE = ("default", "linear", "yarn")  # dynamic: EuroBERT scales by the longest text of a batch, NeoBERT by each text


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


def save_twin(model: NeoBERTPreTrainedModel, config: EuroBertConfig, saved: SavedModel, folder: Path) -> torch.dtype:
    """Write the weights and the config of the twin of a model, and return the dtype of the weights.

    It is that of the tensors in the files of the model: float32 for several, for float64 and for pickles. The config has the
    dtype in which that of the model asks to load it, which may be wider: the mini model is stored in bfloat16.

    Args:
        model: The model.
        config: The config of its twin, whose dtype is set.
        saved: What the folder of the model holds.
        folder: Folder to fill.
    """
    kinds = {tensor.dtype for tensor in saved.tensors.values()}
    dtype = torch.float32
    if kinds in ({"BF16"}, {"F16"}):
        dtype = getattr(torch, FLOATS[kinds.pop()])
    asked = str(saved.config.get("dtype") or saved.config.get("torch_dtype"))
    config.dtype = getattr(torch, asked) if asked in FLOATS.values() else dtype
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


def write_card_of_twin(saved: SavedModel, folder: Path) -> None:
    """Write the card of the twin, with licence and language of the model, and its id on the Hub as the base model.

    Args:
        saved: What the folder of the model holds.
        folder: Folder of the twin.
    """
    is_local = Path(saved.source).is_dir()
    place = saved.folder / CARD if is_local else saved.source
    try:
        known = ModelCard.load(place, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, yaml.YAMLError):  # none, or damaged: the new card says what is not known
        known = {}
    write_card(folder, folder.name, known.get("license"), known.get("language"), record_folder=saved.folder)
    card = ModelCard.load(folder / CARD)
    card.data.tags = ["neobert", *card.data.tags]
    if not is_local:
        card.data.base_model = saved.source
        card.data.base_model_relation = "finetune"
    what = (
        "A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)) in the layout of EuroBERT: the same numbers, "
    )
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


def _pairs_to_halves(rows_HKD: torch.Tensor) -> torch.Tensor:
    """Move row 2i of each head to i, and row 2i + 1 to i + K / 2."""
    return rows_HKD.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
