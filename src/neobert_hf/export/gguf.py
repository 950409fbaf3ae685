"""GGUF files for llama.cpp, written by the official package `gguf`.

llama.cpp's own converter reads NeoBERT wrongly and without an error: it takes the rows of `qkv`, which are grouped per head, for
all queries, all keys, all values. So this module writes the file itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.files import saving
from ..data.origins import load_tokenizer, read_json
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import NeoBERTForSequenceClassification, NeoBERTModel

logger = logging.get_logger(__name__)

FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}  # dtype, and its name in llama.cpp
BLOCK = 32  # numbers that share a scale in q8_0
ENCODERS = ("NeoBERT", "NeoBERTModel")
MASKED_LMS = ("NeoBERTLMHead", "NeoBERTForMaskedLM")
CLASSIFIER = "NeoBERTForSequenceClassification"
# Settings of sentence-transformers' pooling, in the older form and in the newer one, and the name in llama.cpp.
POOLINGS = {
    **{"pooling_mode_mean_tokens": "MEAN", "pooling_mode_cls_token": "CLS", "pooling_mode_lasttoken": "LAST"},
    **{"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"},
}
# Names of layers, here and in llama.cpp.
LAYERS = {
    "encoder": "token_embd",
    "attention_norm": "attn_norm",
    "qkv": "attn_qkv",
    "wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.w12": "ffn_up",
    "ffn.w3": "ffn_down",
    "layer_norm": "enc.output_norm",
    "dense": "cls",
    "classifier": "cls.output",
}


def write_gguf(folder: Path, file: Path, dtype: str = "f32") -> None:
    """Write an encoder or a sequence classifier, with its tokenizer, as GGUF.

    The file says how llama.cpp pools the token states: as the modules of an embedding model say; by the mean if there are no
    modules; by the head ("rank") for a classifier. llama.cpp has no masked-LM head, so this head is left out, with a warning.

    Args:
        folder: A NeoBERT with its tokenizer; as an embedding model, one of Transformer, Pooling and Normalize.
        file: File to write.
        dtype: Type of the matrices: "f32", "f16", or "q8_0", 8-bit numbers with a scale for 32 of them. In q8_0, a matrix whose
            rows are no multiple of 32 wide is f16.

    Raises:
        ValueError: llama.cpp does not compute this model, or has not its tokenizer. Nothing is written.
        OSError: The folder cannot be read, or the file cannot be written.
    """
    if dtype not in FILE_TYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(FILE_TYPES)}")
    config = NeoBERTConfig.from_pretrained(folder)
    pooling = _pooling(folder, config)
    tokenizer = load_tokenizer(str(folder))
    _check_tokenizer(tokenizer)
    model_class = NeoBERTForSequenceClassification if pooling == "RANK" else NeoBERTModel

    writer = gguf.GGUFWriter(file, "neo-bert")
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    _add_settings(writer, config, pooling, dtype)
    for name, tensor in model_class.from_pretrained(folder, dtype=torch.float32).state_dict().items():
        name, array = _as_in_llama_cpp(name.removeprefix("model."), tensor.numpy(), config.num_attention_heads)
        stored = "f32" if array.ndim == 1 else "f16" if dtype == "q8_0" and array.shape[1] % BLOCK else dtype
        kind = gguf.GGMLQuantizationType[stored.upper()]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    with saving(file, "nothing of it can be used"):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _pooling(folder: Path, config: NeoBERTConfig) -> str:
    """Return llama.cpp's name of the pooling, or refuse a model that llama.cpp does not compute."""
    architecture = (config.architectures or ENCODERS)[0]
    if architecture not in (*ENCODERS, *MASKED_LMS, CLASSIFIER):
        raise ValueError(f"llama.cpp has no head for {architecture}, the model in {folder}; export it to ONNX")
    if (rope_type := config.rope_parameters["rope_type"]) != "default":
        raise ValueError(
            f"rope_type={rope_type!r} in {folder}: llama.cpp scales RoPE otherwise; export to ONNX, or remove the scaling from "
            "config.json"
        )
    modules = read_json(folder / "modules.json") if (folder / "modules.json").is_file() else []
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if architecture == CLASSIFIER and kinds in ([], ["Transformer"]):  # the second is a cross-encoder
        return "RANK"
    if kinds not in ([], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"{folder} has the modules {', '.join(kinds)}, and llama.cpp computes Transformer and Pooling only; export it to "
            "ONNX, or save its encoder alone, AutoModel and AutoTokenizer, and export that"
        )
    if architecture in MASKED_LMS:
        logger.warning("llama.cpp has no masked-LM head: the GGUF file holds the encoder alone.")
    if not kinds:
        return "MEAN"
    settings = read_json(folder / modules[1]["path"] / "config.json")
    modes = [name for name in settings if name.startswith("pooling_mode_") and settings[name]]
    mode = settings["pooling_mode"] if "pooling_mode" in settings else "+".join(modes)
    if str(mode) not in POOLINGS:
        raise ValueError(f"{folder} pools by {mode}, and llama.cpp by mean, cls or lasttoken; export it to ONNX")
    if not settings.get("include_prompt", True):
        raise ValueError(f"{folder} pools without the prompt, and llama.cpp pools all tokens; export it to ONNX")
    return POOLINGS[mode]


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that llama.cpp does not have, and warn of normalizers that llama.cpp leaves out."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    *others, last = _normalizers(tokenizer)
    is_bert = (
        parts["model"]["type"] == "WordPiece"
        and parts["model"]["continuing_subword_prefix"] == "##"
        and {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}.items() <= last.items()
        and parts["pre_tokenizer"] == {"type": "BertPreTokenizer"}
        and tokenizer("")["input_ids"] == [tokenizer.cls_token_id, tokenizer.sep_token_id]
        and None not in (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id)
    )
    if not is_bert:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} is not the one that llama.cpp has: WordPiece with BertNormalizer, "
            "BertPreTokenizer and BERT's five special tokens; export to ONNX"
        )
    if others:
        logger.warning(
            f"llama.cpp lacks normalizers of this tokenizer ({', '.join(part['type'] for part in others)}), so a text that they "
            "change gets other token ids; give llama.cpp tokenizer.backend_tokenizer.normalizer.normalize_str(text) instead."
        )


def _normalizers(tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    normalizer = json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"] or {}
    return normalizer.get("normalizers", [normalizer])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Add the vocabulary, in which llama.cpp marks the tokens that begin a word, and WordPiece those that continue it."""
    tokens = [(f"[PAD{i}]", gguf.TokenType.UNUSED) for i in range(vocab_size)]  # for embeddings without a token
    for token, i in tokenizer.get_vocab().items():
        tokens[i] = (token[2:] if token.startswith("##") else f"\u2581{token}", gguf.TokenType.NORMAL)
    for i, token in tokenizer.added_tokens_decoder.items():
        tokens[i] = (token.content, gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED)
    texts, kinds = zip(*tokens)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("bert-bge")  # llama.cpp requires a name that it knows, and ignores it for WordPiece
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_type_count(1)
    writer.add_bos_token_id(tokenizer.cls_token_id)
    writer.add_eos_token_id(tokenizer.sep_token_id)
    writer.add_sep_token_id(tokenizer.sep_token_id)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_mask_token_id(tokenizer.mask_token_id)
    # By these, the reranking of llama.cpp's server joins question and document as [CLS] question [SEP] document [SEP].
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_sep_token(False)
    bert = _normalizers(tokenizer)[-1]
    writer.add_bool("tokenizer.ggml.normalizer.lowercase", bert["lowercase"])
    strips = bert["lowercase"] if bert["strip_accents"] is None else bert["strip_accents"]
    writer.add_bool("tokenizer.ggml.normalizer.strip_accents", strips)


def _add_settings(writer: gguf.GGUFWriter, config: NeoBERTConfig, pooling: str, dtype: str) -> None:
    writer.add_name("NeoBERT")
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.swiglu_width)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType[pooling])
    if pooling == "RANK":
        writer.add_classifier_output_labels([config.id2label[i] for i in range(config.num_labels)])
        before_head = gguf.PoolingType[config.classifier_pooling.upper()]
        writer.add_uint32("neo-bert.classifier.pooling_type", before_head)


def _as_in_llama_cpp(name: str, array: np.ndarray, num_heads: int) -> tuple[str, np.ndarray]:
    """Return a tensor under llama.cpp's name; rows of `qkv` are there all queries, all keys, all values."""
    block, layer, kind = re.fullmatch(r"(?:transformer_encoder\.(\d+)\.)?(.+)\.(weight|bias)", name).groups()
    if layer == "qkv":
        width = array.shape[1]
        array = array.reshape(num_heads, 3, -1, width).swapaxes(0, 1).reshape(-1, width)
    return f"{'' if block is None else f'blk.{block}.'}{LAYERS[layer]}.{kind}", array
