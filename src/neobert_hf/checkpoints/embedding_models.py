"""sentence-transformers models on a NeoBERT: dense, sparse (SPLADE) and multi-vector (ColBERT).

All modules are stock types, so a saved model loads without this package: with `trust_remote_code=True`, or after
`import neobert_hf` without it. sentence-transformers is imported inside functions, since it is optional and slow to import.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.lengths import Truncation, beginning, fact_of_truncated, tokens_lost
from ..data.wordpiece import tokenizer_hash
from ..files.terminal import printable
from ..model.configuration_neobert import NeoBERTConfig
from .saved_model import SavedModel
from .tokenizer import keep_known_settings
from .trust import check_vocabulary

logger = logging.get_logger(__name__)

MOST_COUNTED = 5000  # inputs; tokenizing all texts of a large set takes minutes

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
    from sentence_transformers.base.modules import Transformer


def sentence_transformer(
    model_name_or_path: str,
    pooling: Literal["mean", "cls"] = "mean",
    prompts: dict[str, str] | None = None,
    normalize: bool = False,
    include_prompt: bool = True,
    max_seq_length: int | None = None,
    model_kwargs: dict | None = None,
) -> SentenceTransformer:
    """Build an embedding model: a NeoBERT and pooling. The model removes padding on every device before it computes.

    Args:
        model_name_or_path: A NeoBERT with its tokenizer; a head is ignored.
        pooling: "mean" of the token vectors, as in the paper (section 5.2), or "cls", the vector of the first token.
        prompts: Texts before the input, by name; `encode(..., prompt_name=...)` chooses one. They are saved with the model.
        normalize: Scale each embedding to length 1.
        include_prompt: Whether the mean includes the tokens of the prompt, as in the paper's evaluation.
        max_seq_length: Length in tokens at which texts are truncated; by default the maximum of tokenizer and model.
        model_kwargs: Arguments of `from_pretrained`, such as `{"dtype": torch.bfloat16}` or `{"attn_implementation": ...}`.

    Raises:
        ValueError: `pooling` is unknown, `include_prompt` is False with "cls", or the model is not a NeoBERT.
        OSError: The folder or the Hub holds no such model.
    """
    if pooling not in ("mean", "cls"):
        raise ValueError(f"pooling={pooling!r} is not one of mean, cls")
    if pooling == "cls" and not include_prompt:
        raise ValueError("include_prompt=False is about a mean, and pooling='cls' has none; remove one of the two")
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    from .common_form import SentenceTransformer

    saved = SavedModel(model_name_or_path)
    transformer = _transformer(saved, "feature-extraction", max_seq_length, model_kwargs)
    _warn_of_other_modules(saved)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling, include_prompt)]
    return SentenceTransformer(modules=[*modules, Normalize()] if normalize else modules, prompts=prompts)


def _warn_of_other_modules(saved: SavedModel) -> None:
    """Warn of modules of a saved embedding model that `sentence_transformer` does not make."""
    kinds = [kind.rpartition(".")[2] for _, kind in saved.modules]
    left_out = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if left_out:
        names = printable(", ".join(left_out))
        fact = f"{saved.source} is an embedding model with {names}, which sentence_transformer leaves out"
        logger.warning(f"{fact}; SentenceTransformer opens all of its modules")


def sparse_encoder(
    model_name_or_path: str, max_seq_length: int | None = None, model_kwargs: dict | None = None
) -> SparseEncoder:
    """Build a SPLADE model (arXiv 2109.10086): the masked-LM head maps each text to weights over the vocabulary.

    Plain `SparseEncoder(path)` does not recognize that the published architecture, `NeoBERTLMHead`, has this head.

    Args:
        model_name_or_path: A NeoBERT with a masked-LM head, and its tokenizer.
        max_seq_length: As for `sentence_transformer`.
        model_kwargs: As for `sentence_transformer`.

    Raises:
        ValueError: The model is not a NeoBERT.
        OSError: The folder or the Hub holds no such model.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    saved = SavedModel(model_name_or_path)
    transformer = _transformer(saved, "fill-mask", max_seq_length, model_kwargs)
    return SparseEncoder(modules=[transformer, SpladePooling("max")])


def multi_vector_encoder(model: str | SentenceTransformer) -> MultiVectorEncoder:
    """Build a late-interaction model (ColBERT, arXiv 2004.12832): a text becomes the vectors of its tokens, of length 1.

    Plain `MultiVectorEncoder(path)` adds an untrained projection; this model uses the encoder's own token vectors. A score is the
    mean over the tokens of the query.

    Args:
        model: A path to a NeoBERT with its tokenizer, or an embedding model, whose weights the result shares.

    Raises:
        ValueError: The path does not hold a NeoBERT.
        OSError: The folder or the Hub holds no such model.
    """
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    if isinstance(model, str):
        transformer = _transformer(SavedModel(model), "feature-extraction")
        prompts = None
    else:
        transformer = model[0]
        prompts = model.prompts
    modules = [transformer, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, prompts=prompts, similarity_fn_name="meanmaxsim")


def _transformer(
    saved: SavedModel, task: str, max_seq_length: int | None = None, model_kwargs: dict | None = None
) -> Transformer:
    from sentence_transformers.base.modules import Transformer

    saved.check_neobert()
    if task == "fill-mask":
        saved.check_head("masked words")
    options = {"max_seq_length": max_seq_length, "model_kwargs": model_kwargs}
    transformer = Transformer(saved.source, transformer_task=task, **options)
    adopt(transformer, saved.source)
    return transformer


def adopt(module: torch.nn.Module, source: str | Path) -> None:
    """Check the tokenizer of a model's first module; the module of a NeoBERT then saves no settings of unknown names.

    Raises:
        ValueError: The tokenizer is not that of the model.
    """
    config, tokenizer = getattr(module, "config", None), getattr(module, "tokenizer", None)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        words = tokenizer.get_vocab()
        check_vocabulary(words, len(tokenizer.all_special_ids), source, getattr(config, "vocab_size", None))
    if isinstance(config, NeoBERTConfig):
        keep_known_settings(config, source)
        module.processor = keep_known_settings(tokenizer, source)  # one of images would save its own settings


def open_embedding_model(name: str, revision: str | None = None, **options) -> SentenceTransformer:
    """Open an embedding model, or a bare NeoBERT with mean pooling, as `SentenceTransformer(name)` does, with checks.

    Args:
        name: Folder or id on the Hub.
        revision: Branch, tag or commit on the Hub.
        options: Other arguments of `SentenceTransformer`.

    Raises:
        ValueError: As of `SavedModel.check` and `adopt`; or the folder holds a SPLADE model, a multi-vector model or a
            cross-encoder of sentence-transformers.
        OSError: The folder or the Hub holds no such model.
    """
    from .common_form import SentenceTransformer

    kind = SavedModel(name, revision).check().library
    if kind not in (None, "SentenceTransformer"):
        fault = f"{name} holds a {kind}, which gives no single vector for each text"
        raise ValueError(f"{fault}; open it by sentence_transformers.{kind}, or choose one of SentenceTransformer")
    model = SentenceTransformer(name, revision=revision, **options)
    adopt(model[0], name)
    return model


def prompt_of(model: SentenceTransformer, *names: str | None) -> str:
    """Return the prompt of the first name that the model knows, or its default one; `encode_query` has the name "query"."""
    return model.prompts.get(next((name for name in names if name in model.prompts), model.default_prompt_name)) or ""


def longest_input(model: SentenceTransformer | CrossEncoder) -> int | None:
    """Return the number of tokens at which a model truncates a text; None if it reads all of them."""
    longest = model.max_seq_length
    return None if longest is None or math.isinf(longest) else int(longest)


def what_is_read(model: SentenceTransformer | CrossEncoder, text: str) -> str:
    """Return the part of a text that the tokenizer gets: all of it, but of a very long one only the beginning."""
    longest = longest_input(model)
    return text if longest is None else beginning(text, model.tokenizer, longest)


def warn_of_truncated(
    model: SentenceTransformer | CrossEncoder, what: str, inputs: Sequence, truncation: Truncation = "warn"
) -> None:
    """Say in a line how many inputs are truncated, and how many tokens are lost; of very many, the longest are counted.

    Args:
        model: The model.
        what: What the inputs are.
        inputs: Texts, prompts included, or pairs of texts for a cross-encoder.
        truncation: "warn"; "error", a ValueError in place of the line; or "off".
    """
    longest = longest_input(model)
    if longest is None:
        return
    counted = sorted(inputs, key=lambda texts: len("".join(texts)))[-MOST_COUNTED:]
    lost = tokens_lost(model.tokenizer, longest, counted)
    fact = fact_of_truncated(lost, len(inputs), longest, truncation)
    if fact:
        least = "at least " if len(counted) < len(inputs) else ""
        logger.warning(f"{printable(what)}: {least}{fact}; give shorter ones or max_seq_length")


def fingerprint(model: SentenceTransformer, prompts: Mapping[str, str]) -> str:
    """Return a hash of everything that decides an embedding or a score, 16 hexadecimal digits.

    It covers weights, modules, configuration, tokenizer, maximum length, dimension, similarity, the model's prompts and
    `prompts`.
    """
    config = model[0].config.to_dict() if hasattr(model[0], "config") else {}  # a StaticEmbedding has none
    settings = {
        "modules": str(model),
        "config": {name: config[name] for name in config.keys() - {"_name_or_path", "transformers_version"}},
        "tokenizer": tokenizer_hash(model.tokenizer),
        "length": model.max_seq_length,
        "dimension": model.truncate_dim,
        "similarity": str(model.similarity_fn_name),
        "prompts": [dict(model.prompts), model.default_prompt_name, dict(prompts)],
    }
    return hash_of_weights(model, settings)


def hash_of_weights(model: torch.nn.Module, settings: Mapping | None = None, dtype: torch.dtype | None = None) -> str:
    """Return a hash of a module's weights, converted to `dtype`, and of settings of plain types, 16 hexadecimal digits."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.detach().to("cpu", dtype)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
