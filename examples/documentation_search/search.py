"""Semantic search in the documentation of this Python: by embeddings, and optionally by token vectors and by words."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from tqdm.auto import tqdm
from transformers.utils import logging

from ..data.arrays import CACHE, load_arrays, save_arrays
from ..data.texts import check_texts
from ..embeddings.contextual import is_contextual
from ..embeddings.memory import batch_bytes, check_memory
from ..embeddings.models import fingerprint, longest_input
from .documentation import Entry, collect_documentation, first_sentence, views
from .ranking import WordIndex, ranking, reciprocal_rank_fusion

logger = logging.get_logger(__name__)

KEPT_TOKEN_BYTES = 1 << 30  # above this size token vectors are computed for the candidates of each query
# Of two entries that a question resembles alike, people mean the one that code mentions more: `str.startswith`, not
# `tkinter.Text.search`. Chosen with the 110 everyday questions of benchmarks/questions.py.
MENTION_BONUS = 0.01
# An index of one vector for each text reads so many tokens of it. With the mini model's 128 tokens it reads a fifth more of the
# standard library, and answers 2 of 600 questions about details more (docs/mini.md).
INDEXED_TOKENS = 64
BATCHES_AT_ONCE = 4  # number of batches that are embedded before the progress bar moves and token vectors are rounded


@dataclass(frozen=True)
class Hit:
    """A retrieved entry and its score.

    Attributes:
        score: Cosine of the vector of the question and the nearest vector of the entry (`views`), plus `MENTION_BONUS` for each
            doubling of `1 + entry.mentions`. After reranking the mean over the tokens of the question of the largest cosine
            with a token of the entry takes the place of the cosine. After fusion: sum of reciprocal ranks.
        entry: The entry.
        meaning: What `score` is, for people: "0.78 cosine", with "token cosine" after reranking, and with ", mentioned in 57
            modules" if `entry.mentions` is not 0; or "rank 1 by meaning, 4 by words".
    """

    score: float
    entry: Entry
    meaning: str

    def describe(self, width: int) -> str:
        """Name and parameters on one line of at most `width` characters, the first sentence, how to import it, and the score.

        An entry without a docstring says so in place of the sentence.
        """
        title = _printable(f"{self.entry.public_name}{self.entry.signature}")
        if len(title) > width:
            title = f"{title[: max(width, 4) - 4]} ..."
        sentence = _printable(first_sentence(self.entry.text)[0]) or "(no docstring)"
        return f"{title}\n    {sentence}\n    {import_line(self.entry)}    ({self.meaning})"

    def __str__(self) -> str:
        return self.describe(shutil.get_terminal_size().columns)


def _printable(text: str) -> str:
    """The text on one line, without the control characters that a docstring may show and a terminal would obey."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def import_line(entry: Entry) -> str:
    """The import that gives the object: of a module itself, of a function, or of the class that holds a method.

    Returns:
        The line of Python, "built in" for builtins, or "language topic".
    """
    if not entry.module:
        return "language topic"
    if entry.module == "builtins":
        return "built in"
    name = entry.qualname.split(".")[0]
    return f"from {entry.module} import {name}" if name else f"import {entry.module}"


@dataclass(frozen=True)
class TokenVectors:
    """Unit-length token vectors of several entries, quantized to 8 bits; the error of a cosine is about 0.001.

    Attributes:
        values: (number of tokens, width), int8.
        scales: (number of tokens,), float32; value times scale is the vector.
        starts: (number of entries + 1,), int64; index of the first token of each entry.
    """

    values: np.ndarray
    scales: np.ndarray
    starts: np.ndarray

    def take(self, numbers: Sequence[int]) -> TokenVectors:
        """Return the vectors of the given entries, in the given order."""
        slices = [slice(self.starts[i], self.starts[i + 1]) for i in numbers]
        values, scales = (np.concatenate([array[each] for each in slices]) for array in (self.values, self.scales))
        return TokenVectors(values, scales, np.cumsum([0, *(each.stop - each.start for each in slices)]))

    def scores(self, question: np.ndarray) -> np.ndarray:
        """Score each entry by late interaction (ColBERT, arXiv 2004.12832): mean over the query tokens of the maximum cosine."""
        cosines = (self.values.astype(np.float32) * self.scales[:, None]) @ question.T
        return np.maximum.reduceat(cosines, self.starts[:-1]).mean(1)


class DocumentationIndex:
    """Embedded documentation of this Python; the vectors are cached in `HF_HOME`, so a second index loads quickly.

    An entry has a vector for each of its `views`, and the nearest of them counts. A vector is that of the first `INDEXED_TOKENS`
    tokens; with reranking, of as many as the model reads.

    Args:
        model: Embedding model.
        packages: Packages as for `documentation.collect_documentation`; entries without a public name are left out.
        num_candidates: Number of nearest entries to rerank with token vectors (`TokenVectors.scores`); 0 disables reranking.
            Token vectors are kept in memory and in the cache, up to `KEPT_TOKEN_BYTES`.
        batch_size: Number of texts per forward, at least 1.
        hybrid: Fuse this ranking with one by words (BM25) by `ranking.reciprocal_rank_fusion`. The index of words is made anew at
            each start, in about a second for 10,000 entries.
        show_progress: Show progress bars.
        cache_dir: Folder of the cached entries and vectors; the key of vectors is a hash of the model and of the texts.

    Raises:
        ValueError: A package is not installed, reranking is requested of a model without token vectors, a number is out of
            bounds, or there is not enough memory.
        ModuleNotFoundError: `hybrid` needs the package bm25s, of the extra `hybrid`.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        packages: list[str] | None = None,
        num_candidates: int = 0,
        batch_size: int = 64,
        show_progress: bool = True,
        cache_dir: str | Path = CACHE,
        hybrid: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is too small; choose at least 1")
        if num_candidates < 0:
            raise ValueError(f"num_candidates={num_candidates} is below 0; choose 0 to disable reranking")
        if num_candidates and (is_contextual(model) or not isinstance(model[0], Transformer)):
            raise ValueError(
                f"num_candidates={num_candidates}: {type(model[0]).__name__} has no token vectors to rerank with; choose 0"
            )
        self.model, self.num_candidates, self.batch_size = model, num_candidates, batch_size
        if hybrid:
            WordIndex([])  # a missing package is an error before the work
        self.entries = collect_documentation(show_progress, packages, cache_dir, public_api=True)
        parts = [views(entry) for entry in self.entries]
        self.starts, texts = np.cumsum([0, *map(len, parts)]), list(chain.from_iterable(parts))
        width, longest = model.get_embedding_dimension(), longest_input(model) or 512
        # the modules after the first may narrow the embedding
        token_width = model[0].get_embedding_dimension() if num_candidates else 0
        # assumes at least three characters a token; the mean on the standard library is 4.7
        token_bytes = sum(min(longest, len(text) // 3 + 2) for text in texts) * token_width
        keeps_tokens = 0 < token_bytes <= KEPT_TOKEN_BYTES
        if token_bytes > KEPT_TOKEN_BYTES:
            logger.warning(
                f"the token vectors of {len(self.entries):,} entries would take {token_bytes / 1e9:.1f} GB, so candidates are "
                "embedded again for each query; choose fewer packages for quick answers"
            )
        expected = {"vectors": (np.float32, (len(texts), width))}
        if keeps_tokens:
            expected["values"], expected["scales"] = (np.int8, (None, token_width)), (np.float32, (None,))
            expected["starts"] = (np.int64, (len(texts) + 1,))
        with _reading_at_most(model, longest if num_candidates else INDEXED_TOKENS):
            key = hashlib.sha256("\0".join([fingerprint(model, {}), *texts]).encode()).hexdigest()[:32]
            file = Path(cache_dir, f"vectors-{'tokens-' if keeps_tokens else ''}{key}.safetensors")
            arrays = load_arrays(file, expected)
            if arrays is None:
                kept_bytes = 4 * len(texts) * width + (token_bytes if keeps_tokens else 0)
                check_memory(
                    kept_bytes + batch_bytes(model, batch_size),
                    f"embedding {len(self.entries):,} entries, {batch_size} at once",
                    "choose fewer packages, or a smaller batch_size",
                )
                arrays = self._embed(texts, keeps_tokens, show_progress)
                save_arrays(file, arrays)
        self.vectors = arrays["vectors"]
        self.tokens = self._tokens(arrays, self.starts) if keeps_tokens else None
        self.words = WordIndex(entry.full_text for entry in self.entries) if hybrid else None
        self.bonuses = MENTION_BONUS * np.log2([1 + entry.mentions for entry in self.entries])

    def search(self, question: str, top_k: int = 5) -> list[Hit]:
        """Return the entries that match the question best, best first.

        Raises:
            ValueError: The question is not a string or holds a lone surrogate, or `top_k` is below 1.
        """
        if top_k < 1:
            raise ValueError(f"top_k={top_k} is too small; choose at least 1")
        check_texts([question])
        if self.num_candidates:
            ((vector, tokens),) = _with_tokens(self.model.encode_query, [question], 1)
        else:
            (vector,) = self.model.encode_query([question], normalize_embeddings=True)
        cosines = self.vectors @ np.asarray(vector, np.float32)  # every vector is compared
        scores = np.maximum.reduceat(cosines, self.starts[:-1])
        order, kind = ranking(scores + self.bonuses), "cosine"
        if self.num_candidates:
            nearest, rest = np.split(order, [max(top_k, self.num_candidates)])
            candidates = self.tokens.take(nearest) if self.tokens else self._embed_tokens(nearest)
            scores[nearest] = candidates.scores(tokens)
            reranked = nearest[ranking((scores + self.bonuses)[nearest])]
            order, kind = np.concatenate([reranked, rest]), "token cosine"
        if self.words is not None:
            return self._fused(order, ranking(self.words.scores(question), above=0), top_k)
        hits = []
        for i in order[:top_k]:
            entry, meaning = self.entries[i], f"{scores[i]:.2f} {kind}"
            if entry.mentions:
                meaning += f", mentioned in {entry.mentions} module{'' if entry.mentions == 1 else 's'}"
            hits.append(Hit(float(scores[i] + self.bonuses[i]), entry, meaning))
        return hits

    def _fused(self, by_meaning: np.ndarray, by_words: np.ndarray, top_k: int) -> list[Hit]:
        ranks = [{int(i): rank for rank, i in enumerate(each, 1)} for each in (by_meaning, by_words)]
        hits = []
        for i, score in reciprocal_rank_fusion((by_meaning, by_words))[:top_k]:
            words = f"{ranks[1][i]} by words" if i in ranks[1] else "no word in common"
            hits.append(Hit(score, self.entries[i], f"rank {ranks[0][i]} by meaning, {words}"))
        return hits

    def _embed(self, texts: list[str], keeps_tokens: bool, show_progress: bool) -> dict[str, np.ndarray]:
        """Embed long texts first, so that a lack of memory shows at the start; at most `BATCHES_AT_ONCE` batches at once."""
        encode, size = self.model.encode_document, self.batch_size * BATCHES_AT_ONCE
        vectors, tokens = [None] * len(texts), [None] * len(texts)
        order = np.argsort([-len(text) for text in texts], kind="stable")
        with tqdm(total=len(texts), desc="embedding", unit=" texts", disable=not show_progress) as bar:
            for start in range(0, len(texts), size):
                numbers = order[start : start + size]
                part = [texts[i] for i in numbers]
                if keeps_tokens:
                    for i, (vector, states) in zip(numbers, _with_tokens(encode, part, self.batch_size)):
                        vectors[i], tokens[i] = vector, _round(states)
                else:
                    options = dict(normalize_embeddings=True, batch_size=self.batch_size, show_progress_bar=False)
                    for i, vector in zip(numbers, encode(part, **options)):
                        vectors[i] = np.asarray(vector, np.float32)
                bar.update(len(numbers))
        arrays = {"vectors": np.stack(vectors)}
        if keeps_tokens:
            arrays["values"], arrays["scales"] = (np.concatenate(parts) for parts in zip(*tokens))
            arrays["starts"] = np.cumsum([0, *(len(each[1]) for each in tokens)])
        return arrays

    def _embed_tokens(self, numbers: Sequence[int]) -> TokenVectors:
        parts = [views(self.entries[i]) for i in numbers]
        arrays = self._embed(list(chain.from_iterable(parts)), keeps_tokens=True, show_progress=False)
        return self._tokens(arrays, np.cumsum([0, *map(len, parts)]))

    @staticmethod
    def _tokens(arrays: dict[str, np.ndarray], starts: np.ndarray) -> TokenVectors:
        """Token vectors of entries, of which each has the texts from `starts[i]` to `starts[i + 1]`."""
        return TokenVectors(arrays["values"], arrays["scales"], arrays["starts"][starts])


@contextmanager
def _reading_at_most(model: SentenceTransformer, num_tokens: int) -> Iterator[None]:
    """Truncate texts at `num_tokens` inside the context; a model without a maximum length reads whole texts."""
    longest = longest_input(model)
    if longest is None:
        yield
        return
    model.max_seq_length = min(longest, num_tokens)
    try:
        yield
    finally:
        model.max_seq_length = longest


def _round(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize each vector to 8-bit integers and a scale."""
    scales = np.abs(vectors).max(1) / 127
    return np.rint(vectors / np.maximum(scales, 1e-30)[:, None]).astype(np.int8), scales


def _with_tokens(encode: Callable, texts: Sequence[str], batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each text its vector (width,) and its token vectors (tokens, width), all of unit length."""
    for each in encode(texts, batch_size=batch_size, output_value=None, show_progress_bar=False):
        states = each["token_embeddings"][each["attention_mask"].bool()]
        yield tuple(F.normalize(x.float(), dim=-1).cpu().numpy() for x in (each["sentence_embedding"], states))
