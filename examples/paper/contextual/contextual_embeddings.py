"""Contextual document embeddings in use: build the model, embed a corpus as its context, keep contexts in files.

The import registers the model with the Auto classes, so that `SentenceTransformer(path)` opens a saved folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from contextual_neobert import ContextualNeoBERTConfig, ContextualNeoBERTModel
from safetensors import safe_open
from safetensors.torch import save_file
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import is_sentence_transformer_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging

from neobert_hf import NeoBERTModel
from neobert_hf.checkpoints import FolderTokenizer
from neobert_hf.embeddings import SentenceTransformer, adopt, hash_of_weights, open_embedding_model

logger = logging.get_logger(__name__)

AutoConfig.register(ContextualNeoBERTConfig.model_type, ContextualNeoBERTConfig, exist_ok=True)
AutoModel.register(ContextualNeoBERTConfig, ContextualNeoBERTModel, exist_ok=True)
AutoTokenizer.register(ContextualNeoBERTConfig, fast_tokenizer_class=FolderTokenizer, exist_ok=True)


def contextual_sentence_transformer(
    model_name_or_path: str,
    prompts: dict[str, str] | None = None,
    max_seq_length: int | None = None,
    model_kwargs: dict | None = None,
    **context_options,
) -> SentenceTransformer:
    """Build a contextual embedding model from a NeoBERT, whose weights both stages start from, or load a saved one.

    All modules are stock types. A saved model also loads with `SentenceTransformer(path, trust_remote_code=True)`.

    Args:
        model_name_or_path: A NeoBERT with its tokenizer, or a contextual model; a head is ignored.
        prompts: Prompts by name, as in `sentence_transformer`. Default: those of the saved model.
        max_seq_length: Length in tokens at which texts are truncated. Default: that of the saved model; for a new one, 512 as in
            the paper, or less, so that context, soft prompt and text fit into the training context.
        model_kwargs: Arguments of `from_pretrained`, such as `{"dtype": torch.bfloat16}`.
        **context_options: `context_size`, `num_soft_prompt_tokens` and `context_dropout` of a new model; None is the default.

    Raises:
        ValueError: An option differs from that of a saved model, or the context is longer than the training context.
        OSError: The folder or the Hub holds no such model.

    Source: paper, section 5.2.2 and appendix G.
    """
    config = AutoConfig.from_pretrained(model_name_or_path)
    options = {name: value for name, value in context_options.items() if value is not None}
    if isinstance(config, ContextualNeoBERTConfig):
        if different := [name for name, value in options.items() if value != getattr(config, name)]:
            raise ValueError(f"{model_name_or_path} is contextual already, with another {different[0]}; omit it")
        if is_sentence_transformer_model(model_name_or_path):
            model = open_embedding_model(model_name_or_path, prompts=prompts, model_kwargs=model_kwargs)
            model.max_seq_length = max_seq_length or model.max_seq_length
            return model
        return _host(model_name_or_path, prompts, max_seq_length, model_kwargs)
    encoder = NeoBERTModel.from_pretrained(model_name_or_path, **{"dtype": "auto"} | (model_kwargs or {}))
    model = ContextualNeoBERTModel.from_encoder(encoder, **options)
    with tempfile.TemporaryDirectory() as folder:  # the stock module reads its model from a folder
        model.config.save_pretrained(folder)  # save_pretrained of the model writes in the first process only
        save_file(model.state_dict(), Path(folder, "model.safetensors"), {"format": "pt"})
        AutoTokenizer.from_pretrained(model_name_or_path).save_pretrained(folder)
        return _host(folder, prompts, max_seq_length, model_kwargs)


def _host(path: str, prompts, max_seq_length: int | None, model_kwargs: dict | None) -> SentenceTransformer:
    """The model in a folder as a SentenceTransformer, whose stock module calls the forward for the finished embedding."""
    transformer = Transformer(
        path,
        modality_config={"text": {"method": "forward", "method_output_name": "sentence_embedding"}},
        module_output_name="sentence_embedding",
        model_kwargs=model_kwargs,
        unpad_inputs=False,  # the model reads rows
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
    # An argument of `encode` that reaches the forward. Not `dataset_embeddings`: sentence-transformers caches such tensors.
    model.module_kwargs = {"0": ["embeds_context"]}
    return model


def is_contextual(model: SentenceTransformer) -> bool:
    """Whether an embedding model runs a contextual NeoBERT; its class may come from remote code."""
    return type(getattr(model[0], "model", None)).__name__ == ContextualNeoBERTModel.__name__


def contextual_model(model: SentenceTransformer) -> ContextualNeoBERTModel:
    """Return the contextual NeoBERT inside an embedding model.

    Raises:
        ValueError: The model is of another kind.
    """
    if not is_contextual(model):
        raise ValueError("the embedding model reads no context; build one with contextual_sentence_transformer")
    return model[0].model


def fit_context(
    model: SentenceTransformer,
    corpus: Sequence[str],
    num_documents: int | None = None,
    seed: int = 0,
    prompt: str | None = None,
    **options,
) -> torch.Tensor:
    """Embed a random sample of a corpus as the context of all following embeddings, of documents and queries.

    `model.save` saves the context with the model. The next call replaces it. Embeddings with different contexts cannot be
    compared. A text then costs as much as one that is longer by `num_documents` tokens.

    Args:
        model: A contextual model.
        corpus: Documents. If they are fewer than `num_documents`, they are sampled with replacement and a warning is logged.
        num_documents: Number J of context vectors. Default: the number in training; the quality with another one is unknown.
        seed: Seed of the sample.
        prompt: Text before each document. Default: the model's prompt "document".
        options: Other arguments of `encode`, such as `batch_size`.

    Returns:
        (J, D) context vectors.

    Raises:
        ValueError: The corpus is empty or a string, or the model is plain.
    """
    contextual = contextual_model(model)
    if isinstance(corpus, str) or not len(corpus):
        raise ValueError("corpus must be a list of at least one document; a string is not a list of documents")
    size = num_documents or contextual.config.trained_context_size
    if len(corpus) < size:
        logger.warning(f"The corpus has {len(corpus)} documents for a context of {size}; they are drawn repeatedly.")
    rows = np.random.default_rng(seed).choice(len(corpus), size, replace=len(corpus) < size)
    prompt = model.prompts.get("document") if prompt is None else prompt
    with model.truncate_embeddings(None):  # a context vector is an input of the model
        sample = [corpus[row] for row in rows.tolist()]
        vectors = model.encode(sample, prompt=prompt, convert_to_tensor=True, embeds_context=True, **options)
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
    save_file({"context": contextual.context.float().cpu()}, file, {"origin": _origin(model)})


def load_context(model: SentenceTransformer, file: str | Path) -> None:
    """Set the context that `save_context` wrote; the model needs the same first stage and the same prompt of documents.

    Raises:
        ValueError: The context was made by another model or with other settings, or the file is not a context.
        OSError: The file cannot be read.
    """
    with safe_open(file, "pt") as stream:
        if (stream.metadata() or {}).get("origin") != _origin(model):
            raise ValueError(
                f"{file} holds no context of this model: the weights or settings of the first stage or the prompt of "
                "documents differ; fit a new context with fit_context"
            )
        contextual_model(model).set_context(stream.get_tensor("context"))


def _origin(model: SentenceTransformer) -> str:
    """A hash of what decides a context vector; a model in float32 and its rounding to bfloat16 have the same one."""
    contextual = contextual_model(model)
    config = contextual.config
    settings = [config.num_attention_heads, config.norm_eps, config.rope_parameters, config.max_position_embeddings]
    parts = {"stage": contextual.first_stage, "map": contextual.first_projection, "norm": contextual.context_norm}
    prompt = model.prompts.get("document") or ""
    return hash_of_weights(nn.ModuleDict(parts), {"settings": settings, "prompt": prompt}, torch.bfloat16)


class EvaluatorInContext(InformationRetrievalEvaluator):
    """Evaluator of `pairs_evaluator` for a contextual model: the context is a sample of the evaluator's own documents.

    Args:
        evaluator: Evaluator of a plain model.
    """

    def __init__(self, evaluator: InformationRetrievalEvaluator) -> None:
        self.__dict__.update(vars(evaluator))

    def __call__(self, model: SentenceTransformer, *args, **kwargs) -> dict[str, float]:
        """Evaluate in the context, and restore the model's own."""
        contextual = contextual_model(model)
        own = contextual.context if contextual.config.has_context else None
        fit_context(model, self.corpus)
        try:
            return super().__call__(model, *args, **kwargs)
        finally:
            contextual.set_context(own)
