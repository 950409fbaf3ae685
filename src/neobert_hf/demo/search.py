"""Semantic search in the documentation of this Python: retrieval by embedding, optional reranking by token vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.util import semantic_search
from tqdm.auto import tqdm
from transformers.utils import logging

from ..data.arrays import CACHE, load_arrays, save_arrays
from ..data.texts import check_texts
from ..embeddings.memory import batch_bytes, check_memory
from ..embeddings.models import fingerprint
from .documentation import Entry, collect_documentation, first_sentence

logger = logging.get_logger(__name__)

KEPT_TOKEN_BYTES = 1 << 30  # above this size token vectors are computed for the candidates of each query
BATCHES_AT_ONCE = 16  # number of batches whose token vectors are in memory before rounding


@dataclass(frozen=True)
class Hit:
    """A retrieved entry and its score: the cosine of the texts, or after reranking the mean maximum cosine of query tokens."""

    score: float
    entry: Entry

    def __str__(self) -> str:
        sentence = first_sentence(self.entry.text)[0]
        return f"{self.score:.2f}  {self.entry.name}{self.entry.signature}\n      {sentence}"


@dataclass(frozen=True)
class TokenVectors:
    """Unit-length token vectors of several texts, quantized to 8 bits; the error of a cosine is about 0.001.

    Attributes:
        values: (number of tokens, width), int8.
        scales: (number of tokens,), float32; value times scale is the vector.
        starts: (number of texts + 1,), int64; index of the first token of each text.
    """

    values: np.ndarray
    scales: np.ndarray
    starts: np.ndarray

    @classmethod
    def join(cls, texts: Sequence[np.ndarray]) -> TokenVectors:
        """Quantize the vectors of each text, (tokens, width), and concatenate them."""
        rounded = [_round(vectors) for vectors in texts]
        values, scales = (np.concatenate(parts) for parts in zip(*rounded))
        return cls(values, scales, np.cumsum([0, *map(len, texts)]))

    def take(self, numbers: Sequence[int]) -> TokenVectors:
        """Return the vectors of the given texts, in the given order."""
        slices = [slice(self.starts[i], self.starts[i + 1]) for i in numbers]
        values, scales = (np.concatenate([array[each] for each in slices]) for array in (self.values, self.scales))
        return TokenVectors(values, scales, np.cumsum([0, *(each.stop - each.start for each in slices)]))

    def scores(self, question: np.ndarray) -> np.ndarray:
        """Score each text by late interaction (ColBERT, arXiv 2004.12832): mean over the query tokens of the maximum cosine."""
        cosines = (self.values.astype(np.float32) * self.scales[:, None]) @ question.T
        return np.maximum.reduceat(cosines, self.starts[:-1]).mean(1)


class DocumentationIndex:
    """Embedded documentation of this Python; the vectors are cached in `HF_HOME`, so a second index loads quickly.

    Args:
        model: Embedding model.
        packages: Packages as for `documentation.collect_documentation`.
        num_candidates: Number of nearest entries to rerank with token vectors (`TokenVectors.scores`); 0 disables reranking.
            Token vectors are kept in memory and in the cache, up to `KEPT_TOKEN_BYTES`.
        batch_size: Number of texts per forward, at least 1.
        show_progress: Show progress bars.
        cache_dir: Folder of the cached entries and vectors; the key of vectors is a hash of the model and of the texts.

    Raises:
        ValueError: A package is not installed, reranking is requested of a model without token vectors, a number is out of
            bounds, or there is not enough memory.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        packages: list[str] | None = None,
        num_candidates: int = 0,
        batch_size: int = 64,
        show_progress: bool = True,
        cache_dir: str | Path = CACHE,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is too small; choose at least 1")
        if num_candidates < 0:
            raise ValueError(f"num_candidates={num_candidates} is below 0; choose 0 to disable reranking")
        if num_candidates and not isinstance(model[0], Transformer):
            raise ValueError(
                f"num_candidates={num_candidates}: {type(model[0]).__name__} has no token vectors to rerank with; choose 0"
            )
        self.model, self.num_candidates, self.batch_size = model, num_candidates, batch_size
        self.entries = collect_documentation(show_progress, packages, cache_dir)
        texts = [entry.full_text for entry in self.entries]
        width, longest = model.get_embedding_dimension(), model.max_seq_length or 512
        # assumes at least three characters a token; the mean on the standard library is 4.7
        token_bytes = sum(min(longest, len(text) // 3 + 2) for text in texts) * width if num_candidates else 0
        keeps_tokens = 0 < token_bytes <= KEPT_TOKEN_BYTES
        if token_bytes > KEPT_TOKEN_BYTES:
            logger.warning(
                f"the token vectors of {len(texts):,} entries would take {token_bytes / 1e9:.1f} GB, so candidates are embedded "
                "again for each query; choose fewer packages for quick answers"
            )
        expected = {"vectors": (np.float32, (len(texts), width))}
        if keeps_tokens:
            expected["values"], expected["scales"] = (np.int8, (None, width)), (np.float32, (None,))
            expected["starts"] = (np.int64, (len(texts) + 1,))
        key = hashlib.sha256("\0".join([fingerprint(model, {}), *texts]).encode()).hexdigest()[:32]
        file = Path(cache_dir, f"vectors-{'tokens-' if keeps_tokens else ''}{key}.safetensors")
        arrays = load_arrays(file, expected)
        if arrays is None:
            kept_bytes = 4 * len(texts) * width + (token_bytes if keeps_tokens else 0)
            check_memory(
                kept_bytes + batch_bytes(model, batch_size),
                f"embedding {len(texts):,} entries, {batch_size} at once",
                "choose fewer packages, or a smaller batch_size",
            )
            arrays = self._embed_entries(texts, keeps_tokens, show_progress)
            save_arrays(file, arrays)
        self.vectors = arrays["vectors"]
        self.tokens = TokenVectors(arrays["values"], arrays["scales"], arrays["starts"]) if keeps_tokens else None

    def search(self, question: str, top_k: int = 5) -> list[Hit]:
        """Return the entries that match the question best, best first.

        Raises:
            ValueError: The question is not a string or holds a lone surrogate, or `top_k` is below 1.
        """
        if top_k < 1:
            raise ValueError(f"top_k={top_k} is too small; choose at least 1")
        check_texts([question])
        if not self.num_candidates:
            vector = self.model.encode_query([question], normalize_embeddings=True)
            tokens = None
        else:
            ((_, vector, tokens),) = _embed(self.model.encode_query, [question], 1)
            vector = vector[None]
        (nearest,) = semantic_search(torch.as_tensor(vector), self.vectors, top_k=max(top_k, self.num_candidates))
        hits = [Hit(hit["score"], self.entries[hit["corpus_id"]]) for hit in nearest]
        if tokens is not None:
            numbers = [hit["corpus_id"] for hit in nearest]
            candidates = self.tokens.take(numbers) if self.tokens else self._embed_tokens(numbers)
            compared = [Hit(float(score), hit.entry) for score, hit in zip(candidates.scores(tokens), hits)]
            hits = sorted(compared, key=lambda hit: hit.score, reverse=True)
        return hits[:top_k]

    def _embed_entries(self, texts: list[str], keeps_tokens: bool, show_progress: bool) -> dict[str, np.ndarray]:
        if not keeps_tokens:
            options = dict(normalize_embeddings=True, batch_size=self.batch_size, show_progress_bar=show_progress)
            return {"vectors": np.asarray(self.model.encode_document(texts, **options), np.float32)}
        vectors, tokens = [None] * len(texts), [None] * len(texts)
        embedded = _embed(self.model.encode_document, texts, self.batch_size)
        for i, vector, states in tqdm(
            embedded, total=len(texts), desc="embedding", unit=" entries", disable=not show_progress
        ):
            vectors[i], tokens[i] = vector, _round(states)
        values, scales = (np.concatenate(parts) for parts in zip(*tokens))
        starts = np.cumsum([0, *(len(each[1]) for each in tokens)])
        return {"vectors": np.stack(vectors), "values": values, "scales": scales, "starts": starts}

    def _embed_tokens(self, numbers: Sequence[int]) -> TokenVectors:
        texts = [self.entries[i].full_text for i in numbers]
        found = sorted(_embed(self.model.encode_document, texts, self.batch_size), key=lambda each: each[0])
        return TokenVectors.join([states for _, _, states in found])


def _round(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize each vector to 8-bit integers and a scale."""
    scales = np.abs(vectors).max(1) / 127
    return np.rint(vectors / np.maximum(scales, 1e-30)[:, None]).astype(np.int8), scales


def _embed(encode: Callable, texts: Sequence[str], batch_size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield for each text its number, its vector (width,) and its token vectors (tokens, width), all of unit length.

    Long texts come first, so that a lack of memory shows at the start; at most `BATCHES_AT_ONCE` batches are in memory.
    """
    order = np.argsort([-len(text) for text in texts], kind="stable")
    for start in range(0, len(texts), batch_size * BATCHES_AT_ONCE):
        numbers = order[start : start + batch_size * BATCHES_AT_ONCE]
        found = encode([texts[i] for i in numbers], batch_size=batch_size, output_value=None, show_progress_bar=False)
        for i, each in zip(numbers, found):
            states = each["token_embeddings"][each["attention_mask"].bool()]
            states, vector = (
                F.normalize(x.float(), dim=-1).cpu().numpy() for x in (states, each["sentence_embedding"])
            )
            yield int(i), vector, states
