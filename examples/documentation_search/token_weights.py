"""Embeddings as a weighted mean of mapped token vectors: inverse document frequencies and partial whitening.

Neither needs training. Both are stock modules of sentence-transformers, so a saved model opens as any other.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights
from transformers import PreTrainedTokenizerBase

from neobert_hf import sentence_transformer
from neobert_hf.embeddings import SentenceTransformer

# A weighted mean does not depend on a common factor of its weights. A step of Adam moves a weight by the learning rate, whatever
# its size: large weights stay what they are, and a power of two rounds nothing. float16 holds 4,096 times a weight up to 15.
FACTOR = 4096


def inverse_document_frequencies(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int
) -> dict[str, float]:
    """Return the weight of each token of the vocabulary: ln(1 + (N - n + 0.5) / (n + 0.5)), if n of N texts contain it.

    It is above 0 for every token, so a text without words has a vector too.

    Args:
        tokenizer: Tokenizer of the model.
        texts: Texts to count in, of the kind that the model will embed.
        max_length: Length in tokens at which texts are truncated.

    Source: Robertson and Zaragoza, "The probabilistic relevance framework: BM25 and beyond", 2009, with the 1 of Lucene.
    """
    counts = np.zeros(len(tokenizer))
    for ids in tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]:
        counts[np.unique(ids)] += 1
    weights = np.log1p((len(texts) - counts + 0.5) / (counts + 0.5))
    tokens = tokenizer.convert_ids_to_tokens(range(len(counts)))
    return {token: float(f"{weight:.4g}") for token, weight in zip(tokens, weights)}  # they are saved as text


def partial_whitening(vectors: np.ndarray, power: float = 0.4) -> np.ndarray:
    """Return the linear map after which the covariance C of unit-length embeddings is C^(1 - power) up to a factor.

    Directions in which texts differ most lose weight, so texts of one field are told apart better. The map is linear, so
    embeddings are not centred.

    Args:
        vectors: Embeddings of texts of the kind that the model will embed, (N, width), with N above the width.
        power: 0 changes nothing, 1 whitens.

    Returns:
        A symmetric matrix whose eigenvalues have the geometric mean 1, (width, width), float32.

    Raises:
        ValueError: The embeddings do not vary in each direction.

    Source: whitening (arXiv 2103.15316) in part. Soft-ZCA (arXiv 2411.17538) adds a constant to the variances; this takes a
        power of them.
    """
    unit = vectors.astype(np.float64) / np.linalg.norm(vectors, axis=1, keepdims=True)
    variances, directions = np.linalg.eigh(np.cov(unit, rowvar=False))
    if variances[0] <= variances[-1] * np.finfo(np.float32).eps:
        raise ValueError(
            f"{len(vectors)} embeddings do not vary in each of {vectors.shape[1]} directions; give more and other texts"
        )
    scales = np.exp(-power / 2 * (np.log(variances) - np.log(variances).mean()))
    return ((directions * scales) @ directions.T).astype(np.float32)


def weighted_sentence_transformer(
    folder: str,
    token_weights: Mapping[str, float],
    projection: np.ndarray | None = None,
    max_seq_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> SentenceTransformer:
    """Return an embedding model with a linear map of the token vectors, and a mean that weighs the tokens.

    The map stands before the weights, with which it commutes: sentence-transformers computes weighted tokens in float32, so that
    after them a map in bfloat16 or float16 would not run. The weights are multiplied by `FACTOR`.

    Args:
        folder: A NeoBERT with its tokenizer.
        token_weights: Weight of each token of the vocabulary.
        projection: Map of the token vectors, (width, width), as vector @ projection; None leaves it out.
        max_seq_length: Length in tokens at which texts are truncated; None keeps that of the folder.
        dtype: Data type of the model.
    """
    transformer = sentence_transformer(folder, max_seq_length=max_seq_length, model_kwargs={"dtype": dtype})[0]
    width = transformer.get_embedding_dimension()
    vocabulary = transformer.tokenizer.convert_ids_to_tokens(range(len(transformer.tokenizer)))
    weights = {token: FACTOR * weight for token, weight in token_weights.items()}
    modules = [transformer, WordWeights(vocabulary, weights), Pooling(width, "mean")]
    if projection is not None:
        options = {"activation_function": None, "module_input_name": "token_embeddings"}
        modules.insert(1, Dense(width, width, bias=False, init_weight=torch.tensor(projection.T), **options))
    return SentenceTransformer(modules=modules)
