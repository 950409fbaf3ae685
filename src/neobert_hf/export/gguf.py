"""GGUF files for llama.cpp, written by the official package `gguf`.

llama.cpp's own converter reads NeoBERT wrongly and without an error: it takes the rows of `qkv`, which are grouped per head, for
all queries, all keys, all values. So this module writes the file itself.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..files.output import saving
from ..model.configuration_neobert import NeoBERTConfig
from .graphs import CLASSIFICATION, EmbeddingGraph, Graph
from .onnx_model import Arrays, Run
from .parity import LONG

logger = logging.get_logger(__name__)

FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
BLOCK = 32  # numbers that share a scale in q8_0
POOLINGS = {"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"}  # of sentence-transformers, and of llama.cpp
POOLING_OF = {CLASSIFICATION: "RANK", "feature-extraction": "MEAN"}  # of a model without a pooling of its own


def write_gguf(graph: Graph, file: Path, dtype: str = "f32") -> None:
    """Write an encoder, an embedding model or a sequence classifier as GGUF, with its tokenizer.

    The file says how llama.cpp pools the token states: as the embedding model does, by the mean for an encoder, and by the head
    ("rank") for a classifier. llama.cpp scales a vector to length 1 if its user asks for it.

    Args:
        graph: The model.
        file: File to write.
        dtype: Type of the matrices: "f32", "f16", or "q8_0", 8-bit numbers with a scale for 32 of them. In q8_0, a matrix whose
            rows are no multiple of 32 wide is f16.

    Raises:
        ValueError: llama.cpp does not compute this model, or lacks its tokenizer. Nothing is written.
        OSError: The file cannot be written.
    """
    config = graph.model.config
    pooling = _pooling(graph)
    normalizer = _check_tokenizer(graph.tokenizer)
    writer = gguf.GGUFWriter(file, "neo-bert")
    _add_tokenizer(writer, graph.tokenizer, normalizer, config.vocab_size)
    _add_settings(writer, config, pooling, dtype)
    for name, tensor in graph.model.state_dict().items():
        name, array = _as_in_llama_cpp(name, tensor.numpy(), config)
        stored = dtype
        if array.ndim == 1:
            stored = "f32"
        elif dtype == "q8_0" and array.shape[1] % BLOCK:
            stored = "f16"
        kind = gguf.GGMLQuantizationType[stored.upper()]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    with saving(file):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def llama_cpp_runner(file: Path, graph: Graph) -> Run:
    """Return a function that computes the outputs of the graph with llama.cpp, by the package llama-cpp-python."""
    import llama_cpp

    class Ids:
        """Reads token ids written as a text, since the comparison is one of the model alone."""

        def tokenize(self, text, *options):
            return [int(number) for number in text.split()]

    longest = min(LONG, graph.longest)
    options = {"n_ctx": longest, "n_batch": longest, "n_ubatch": longest, "tokenizer": Ids(), "verbose": False}
    models = {}
    with contextlib.redirect_stderr(io.StringIO()):  # it warns of a pooling that is not that of the file
        for name in graph.outputs:
            pooling = llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED  # that of the file
            if name == "last_hidden_state":
                pooling = llama_cpp.LLAMA_POOLING_TYPE_NONE
            models[name] = llama_cpp.Llama(str(file), embedding=True, pooling_type=pooling, **options)

    def run(batch: Arrays) -> Arrays:
        is_real_BL = batch["attention_mask"] != 0
        texts = [" ".join(map(str, ids[is_real])) for ids, is_real in zip(batch["input_ids"], is_real_BL)]
        outputs = {}
        for name, model in models.items():
            normalize = name == "sentence_embedding" and graph.ends_normalized
            # One text at a time: in a list, llama-cpp-python 0.3.36 returns wrong token states from the second text on.
            found = [np.array(model.embed(text, normalize=normalize), np.float32) for text in texts]
            if name == "last_hidden_state":
                outputs[name] = np.zeros((*is_real_BL.shape, found[0].shape[-1]), np.float32)
                outputs[name][is_real_BL] = np.concatenate(found)
            else:
                outputs[name] = np.stack(found)
            if name == "logits":  # it returns as many numbers as the hidden size; behind the logits they mean nothing
                outputs[name] = outputs[name][:, : graph.model.config.num_labels]
        return outputs

    return run


def _pooling(graph: Graph) -> str:
    """Return llama.cpp's name of the pooling, or refuse a model that llama.cpp does not compute."""
    rope_type = graph.model.config.rope_parameters["rope_type"]
    if rope_type != "default":
        raise ValueError(
            f"rope_type={rope_type!r}: llama.cpp scales RoPE otherwise; export to ONNX, or remove the scaling from config.json"
        )
    if not isinstance(graph, EmbeddingGraph):
        if graph.task not in POOLING_OF:
            raise ValueError(
                f"llama.cpp has no head for {graph.task}; export to ONNX, or the encoder alone: task=feature-extraction"
            )
        return POOLING_OF[graph.task]
    kinds = ", ".join(graph.kinds)
    mode = str(graph.pooling.pooling_mode)
    if kinds not in ("Pooling", "Pooling, Normalize") or mode not in POOLINGS:
        raise ValueError(
            f"llama.cpp pools by {', '.join(POOLINGS)} and has no other module; this model pools by {mode} and has {kinds}, so "
            "its results would differ; export to ONNX, or the encoder alone: task=feature-extraction"
        )
    return POOLINGS[mode]


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> dict:
    """Return the settings of BertNormalizer; refuse a tokenizer, and warn of normalizers, that llama.cpp does not have."""
    if tokenizer is None:
        raise ValueError("a GGUF file holds the tokenizer, and this folder has none; copy that of its model there")
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizer = parts["normalizer"] or {}
    *others, last = normalizer.get("normalizers", [normalizer])
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
    return last


def _add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, normalizer: dict, vocab_size: int
) -> None:
    """Add the vocabulary, in which llama.cpp marks the tokens that begin a word, and WordPiece those that continue it."""
    tokens = [(f"[PAD{i}]", gguf.TokenType.UNUSED) for i in range(vocab_size)]  # for embeddings without a token
    vocab = tokenizer.get_vocab()
    ids = {token[2:]: i for token, i in vocab.items() if token.startswith("##")}
    # Two tokens of one text, as of `word` and `##\u2581word`, would end llama.cpp's process: the word keeps it.
    ids |= {f"\u2581{token}": i for token, i in vocab.items() if not token.startswith("##")}
    for text, i in ids.items():
        tokens[i] = (text, gguf.TokenType.NORMAL)
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
    strips = normalizer["strip_accents"]
    if strips is None:
        strips = normalizer["lowercase"]
    writer.add_bool("tokenizer.ggml.normalizer.lowercase", normalizer["lowercase"])
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


def _as_in_llama_cpp(name: str, array: np.ndarray, config: NeoBERTConfig) -> tuple[str, np.ndarray]:
    """Return a tensor under llama.cpp's name; rows of `qkv` are there all queries, all keys, all values."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NEO_BERT, config.num_hidden_layers)
    if ".qkv." in name:
        grouped = array.reshape(config.num_attention_heads, 3, -1, config.hidden_size)
        array = grouped.swapaxes(0, 1).reshape(-1, config.hidden_size)
    name = name.removeprefix("model.").replace("classifier.", "classifier.out_proj.")
    return names.get_name(name, try_suffixes=(".weight", ".bias")), array
