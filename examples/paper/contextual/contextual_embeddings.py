"""Contextual document embeddings in use: build the model, embed a corpus as its context, keep contexts in files.

sentence-transformers is imported inside functions, as in `models.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging

from ..files.trust import check_source, load_tokenizer
from ..files.writing import writing
from ..model.configuration_neobert import NeoBERTConfig
from ..model.contextual_neobert import ContextualNeoBERTConfig, ContextualNeoBERTModel
from ..model.modeling_neobert import NeoBERTModel
from ..model.weight_files_neobert import explain_damaged_file
from .models import adopt, hash_of_weights, open_embedding_model

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

logger = logging.get_logger(__name__)

# The stock module of sentence-transformers calls the model's forward, which returns the finished embedding.
MODALITY = {"text": {"method": "forward", "method_output_name": "sentence_embedding"}}
# An argument of `encode` that reaches the forward. Not `dataset_embeddings`: sentence-transformers caches each such tensor.
ENCODE_ARGUMENTS = ["embeds_context"]
HASHED_DTYPES = (torch.bfloat16, torch.float16)  # the roundings in which a model may load a context file


def contextual_sentence_transformer(
    model_name_or_path: str,
    prompts: dict[str, str] | None = None,
    max_seq_length: int | None = None,
    model_kwargs: dict | None = None,
    **context_options,
) -> SentenceTransformer:
    """Build a contextual embedding model from a NeoBERT, whose weights both stages start from, or load a saved one.

    All modules are stock types. A saved model also loads with `SentenceTransformer(path)`, with `trust_remote_code=True` or after
    `import neobert_hf`.

    Args:
        model_name_or_path: A NeoBERT with its tokenizer, or a contextual model; a head is ignored.
        prompts: Prompts by name, as in `sentence_transformer`. Default: those of the saved model.
        max_seq_length: Length in tokens at which texts are truncated. Default: that of the saved model; for a new one, 512 as in
            the paper, or less, so that context, soft prompt and text fit into the training context.
        model_kwargs: Arguments of `from_pretrained`, such as `{"dtype": torch.bfloat16}`.
        **context_options: `context_size`, `num_soft_prompt_tokens` and `context_dropout` of a new model; None is the default.

    Raises:
        ValueError: The model is neither a NeoBERT nor a contextual model, an option differs from that of a saved model, or the
            context is longer than the training context.
        OSError: The folder or the Hub holds no such model.

    Source: paper, section 5.2.2 and appendix G.
    """
    from sentence_transformers.util import is_sentence_transformer_model

    check_source(model_name_or_path)
    config = AutoConfig.from_pretrained(model_name_or_path)
    context_options = {name: value for name, value in context_options.items() if value is not None}
    if isinstance(config, ContextualNeoBERTConfig):
        for name, value in context_options.items():
            if value != getattr(config, name, None):
                raise ValueError(
                    f"{name}={value} differs from the {getattr(config, name, None)} of {model_name_or_path}, which is a "
                    f"contextual model already; omit {name}, or start from a NeoBERT"
                )
        if not is_sentence_transformer_model(model_name_or_path):
            return _host(model_name_or_path, prompts, max_seq_length, model_kwargs)
        model = open_embedding_model(model_name_or_path, prompts=prompts, model_kwargs=model_kwargs)
        model.max_seq_length = max_seq_length or model.max_seq_length
        return model
    if not isinstance(config, NeoBERTConfig):
        raise ValueError(
            f"{model_name_or_path} has the model type {config.model_type}, not neobert; choose a NeoBERT checkpoint"
        )
    encoder = NeoBERTModel.from_pretrained(model_name_or_path, **{"dtype": "auto"} | (model_kwargs or {}))
    model = ContextualNeoBERTModel.from_encoder(encoder, **context_options)
    with tempfile.TemporaryDirectory() as folder:  # the stock module reads its model from a folder
        model.config.save_pretrained(folder)  # save_pretrained of the model writes in the first process only
        save_file(model.state_dict(), Path(folder, "model.safetensors"), {"format": "pt"})
        load_tokenizer(model_name_or_path, config.vocab_size).save_pretrained(folder)
        return _host(folder, prompts, max_seq_length, model_kwargs)


def _host(path: str, prompts, max_seq_length: int | None, model_kwargs: dict | None) -> SentenceTransformer:
    """The model in a folder as a SentenceTransformer."""
    from sentence_transformers.base.modules import Transformer

    from .common_form import SentenceTransformer

    transformer = Transformer(
        path, modality_config=MODALITY, module_output_name="sentence_embedding", model_kwargs=model_kwargs
    )
    adopt(transformer, path)
    config = transformer.config
    most = config.max_position_embeddings - config.context_size - config.num_soft_prompt_tokens
    if most < 3:
        raise ValueError(
            f"context_size={config.context_size} and num_soft_prompt_tokens={config.num_soft_prompt_tokens} leave no position "
            f"for a text: the model was trained on {config.max_position_embeddings}; choose a smaller context_size"
        )
    transformer.max_seq_length = max_seq_length or min(transformer.max_seq_length or 512, most, 512)
    model = SentenceTransformer(modules=[transformer], prompts=prompts)
    model.module_kwargs = {"0": ENCODE_ARGUMENTS}
    return model


def is_contextual(model: SentenceTransformer) -> bool:
    """Whether an embedding model runs a contextual NeoBERT; its class may come from remote code."""
    return type(getattr(model[0], "model", None)).__name__ == ContextualNeoBERTModel.__name__


def contextual_model(model: SentenceTransformer) -> ContextualNeoBERTModel:
    """Return the contextual NeoBERT inside an embedding model.

    Raises:
        ValueError: The model is of another kind.
    """
    inner = getattr(model[0], "model", None)
    if not is_contextual(model):
        raise ValueError(
            f"the embedding model runs a {type(inner).__name__}, which reads no context; build one with "
            "neobert_hf.contextual_sentence_transformer"
        )
    return inner


def fit_context(
    model: SentenceTransformer,
    corpus: Iterable[str],
    num_documents: int | None = None,
    seed: int = 0,
    prompt: str | None = None,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> torch.Tensor:
    """Embed a random sample of a corpus as the context of all following embeddings, of documents and queries.

    `model.save` saves the context with the model. The next call replaces it. Embeddings with different contexts cannot be
    compared. A text then costs as much as one that is longer by `num_documents` tokens.

    Args:
        model: A contextual model.
        corpus: Documents. If they are fewer than `num_documents`, they are sampled with replacement and a warning is logged.
        num_documents: Number J of context vectors. Default: the number in training.
        seed: Seed of the sample.
        prompt: Text before each document. Default: the model's prompt "document".
        batch_size: Documents per forward.
        show_progress_bar: Show the progress of embedding.

    Returns:
        (J, D) context vectors.

    Raises:
        ValueError: The corpus is empty or a string, or the model is plain.
    """
    contextual = contextual_model(model)
    documents = corpus if isinstance(corpus, Sequence) and not isinstance(corpus, str) else list(corpus)
    if isinstance(corpus, str) or not len(documents):
        raise ValueError("corpus must be a list of at least one document; a string is not a list of documents")
    trained = contextual.config.trained_context_size
    size = trained if num_documents is None else num_documents
    if size != trained:
        logger.warning(
            f"The context now has {size} documents; this model was trained with {trained}. The quality with another number is "
            "unknown."
        )
    if len(documents) < size:
        logger.warning(
            f"The corpus has {len(documents)} documents, fewer than the {size} of the context; they are sampled with replacement."
        )
    rows = np.random.default_rng(seed).choice(len(documents), size, replace=len(documents) < size)
    sample = [documents[row] for row in rows.tolist()]
    with model.truncate_embeddings(None):  # a context vector is an input of the model
        vectors = model.encode(
            sample,
            prompt=model.prompts.get("document") if prompt is None else prompt,
            batch_size=batch_size,
            convert_to_tensor=True,
            show_progress_bar=show_progress_bar,
            embeds_context=True,
        )
    contextual.set_context(vectors)
    return vectors


def save_context(model: SentenceTransformer, file: str | Path) -> None:
    """Write the context of a model to a safetensors file of 4 J D bytes, 1.6 MB for the paper's model.

    Raises:
        ValueError: The model has no context.
        OSError: The file cannot be written.
    """
    contextual = contextual_model(model)
    if not contextual.config.has_context:
        raise ValueError("the model has no context to save; call fit_context first")
    metadata = {name: value for dtype in HASHED_DTYPES for name, value in _origin(model, dtype).items()}
    with writing(Path(file)) as stream:
        stream.write(save({"context": contextual.context.float().cpu()}, metadata))


def load_context(model: SentenceTransformer, file: str | Path) -> None:
    """Set the context that `save_context` wrote; the model needs the same first stage and the same prompt of documents.

    Raises:
        ValueError: The context was made by another model or with other settings, or the file is not a context.
        OSError: The file cannot be read, or is damaged.
    """
    contextual = contextual_model(model)
    dtype = contextual.dtype if contextual.dtype in HASHED_DTYPES else torch.bfloat16
    with explain_damaged_file(file, "fit a new context with fit_context"), safe_open(file, "pt") as stream:
        stored = stream.metadata() or {}
        if different := [name for name, value in _origin(model, dtype).items() if stored.get(name) != value]:
            names = ", ".join(different).replace(str(dtype), f"the weights of the first stage (compared in {dtype})")
            raise ValueError(
                f"{file} holds no context of this model, which differs in {names}; fit a new context with fit_context"
            )
        contextual.set_context(stream.get_tensor("context"))


def _origin(model: SentenceTransformer, dtype: torch.dtype) -> dict[str, str]:
    """What decides a context vector, as JSON: settings, and the hash of the first stage's weights, rounded to `dtype`.

    A model and its rounding to `dtype` have the same origin.
    """
    contextual = contextual_model(model)
    names = ["num_attention_heads", "norm_eps", "rope_parameters"]
    if contextual.config.rope_parameters["rope_type"] == "dynamic":  # it scales from this length
        names.append("max_position_embeddings")
    settings = {name: getattr(contextual.config, name) for name in names}
    settings["document_prompt"] = model.prompts.get("document") or ""
    parts = {
        "stage": contextual.first_stage,
        "projection": contextual.first_projection,
        "norm": contextual.context_norm,
    }
    return {
        str(dtype): hash_of_weights(nn.ModuleDict(parts), dtype=dtype),
        **{name: json.dumps(value, sort_keys=True) for name, value in settings.items()},
    }
