"""Models of sentence-transformers on a NeoBERT. All modules are stock types, so what they save loads without this package:
`trust_remote_code=True` for the model's own code, or `import neobert_hf` in its place.

sentence-transformers is imported where it is used, since it is optional and slow to import.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch

from ..model.configuration_neobert import NeoBERTConfig

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
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
    """Build an embedding model: a NeoBERT and pooling. Padding costs nothing, the model takes it out by itself on every device.

    Args:
        model_name_or_path: A NeoBERT with its tokenizer; a head, if it has one, is left out.
        pooling: "mean" of the token vectors, as in the paper (section 5.2), or the first one.
        prompts: Texts put before the input, by name; `encode(..., prompt_name=...)` chooses, and they are saved.
        normalize: Scale each embedding to length 1.
        include_prompt: Whether the mean is also over the tokens of the prompt, as in the paper's evaluation.
        max_seq_length: Where texts are cut, in tokens; by default what tokenizer and model allow.
        model_kwargs: For `from_pretrained`, such as `{"dtype": torch.bfloat16}` or `{"attn_implementation": ...}`.

    Raises:
        ValueError: `pooling` is something else, it is "cls" without the prompt, or the model is not a NeoBERT.
        OSError: The folder or the Hub holds no such model.
    """
    if pooling not in ("mean", "cls"):
        raise ValueError(f"pooling={pooling!r} is neither 'mean' nor 'cls'")
    if pooling == "cls" and not include_prompt:
        raise ValueError(
            "include_prompt=False takes tokens out of a mean; pooling='cls' has none. Leave one of the two out"
        )
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    transformer = _transformer(model_name_or_path, "feature-extraction", max_seq_length, model_kwargs)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling, include_prompt)]
    return SentenceTransformer(modules=[*modules, Normalize()] if normalize else modules, prompts=prompts)


def sparse_encoder(
    model_name_or_path: str, max_seq_length: int | None = None, model_kwargs: dict | None = None
) -> SparseEncoder:
    """Build a SPLADE model (arXiv 2109.10086): each text becomes weights over the vocabulary, from the head of masked language
    modelling.

    `SparseEncoder(path)` by itself does not see that the published architecture, `NeoBERTLMHead`, has that head.

    Args:
        model_name_or_path: A NeoBERT with the decoder of masked language modelling, and its tokenizer.
        max_seq_length: As for `sentence_transformer`.
        model_kwargs: As for `sentence_transformer`.

    Raises:
        ValueError: The model is not a NeoBERT.
        OSError: The folder or the Hub holds no such model.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    transformer = _transformer(model_name_or_path, "fill-mask", max_seq_length, model_kwargs)
    return SparseEncoder(modules=[transformer, SpladePooling("max")])


def multi_vector_encoder(model: str | SentenceTransformer) -> MultiVectorEncoder:
    """Build a model for late interaction (ColBERT, arXiv 2004.12832): each text becomes its tokens' vectors, of length 1.

    `MultiVectorEncoder(path)` by itself puts an untrained projection on top; here are the encoder's own vectors, which find more
    than their mean even if only the mean was trained (measured on the mini model, benchmarks/README.md). A score is the mean
    over the question's tokens.

    Args:
        model: A NeoBERT with its tokenizer, or an embedding model, which then shares its weights with the result.

    Raises:
        ValueError: The model is a path, and no NeoBERT is there.
        OSError: The folder or the Hub holds no such model.
    """
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    transformer = _transformer(model, "feature-extraction", None, None) if isinstance(model, str) else model[0]
    modules = [transformer, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    prompts = None if isinstance(model, str) else model.prompts
    return MultiVectorEncoder(modules=modules, prompts=prompts, similarity_fn_name="meanmaxsim")


def _transformer(path: str, task: str, max_seq_length: int | None, model_kwargs: dict | None) -> Transformer:
    from sentence_transformers.base.modules import Transformer

    transformer = Transformer(path, transformer_task=task, max_seq_length=max_seq_length, model_kwargs=model_kwargs)
    if not isinstance(transformer.config, NeoBERTConfig):
        raise ValueError(f"{path} is a {transformer.config.model_type}, not a NeoBERT")
    return transformer


def fingerprint(model: SentenceTransformer, prompts: Mapping[str, str]) -> str:
    """Hash of everything that decides an embedding or a score; 16 hexadecimal digits.

    Weights, modules, configuration, tokenizer, length, dimension, similarity, and the prompts: the model's and those given.
    """
    from sentence_transformers import SimilarityFunction

    from ..data.wordpiece import tokenizer_hash

    settings = {
        "modules": str(model),
        "config": model[0].config.to_dict(),
        "tokenizer": tokenizer_hash(model.tokenizer),
        "length": model.max_seq_length,
        "dimension": model.truncate_dim,
        "similarity": SimilarityFunction(model.similarity_fn_name).value,
        "prompts": [dict(model.prompts), model.default_prompt_name, dict(prompts)],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
