"""Ranking by words (BM25), and the fusion of rankings."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

import numpy as np


def words_of(text: str) -> str:
    """Split identifiers into words: `readLine` and `read_line` become "read Line" and "read line"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"[_.]", " ", text))


class WordIndex:
    """BM25 over texts, by the library bm25s: lower case, identifiers split, English stopwords removed, no stemming.

    Args:
        texts: Texts to rank.

    Raises:
        ModuleNotFoundError: bm25s is not installed.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        try:
            import bm25s
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "ranking by words needs the package bm25s; install it: pip install -e '.[hybrid]'", name="bm25s"
            ) from error
        self._tokenize = functools.partial(bm25s.tokenize, stopwords="en", return_ids=False, show_progress=False)
        words = self._tokenize([words_of(text) for text in texts])
        self._num_texts, self._retriever = len(words), bm25s.BM25()
        if any(words):  # bm25s refuses texts without any word
            self._retriever.index(words, show_progress=False)

    def scores(self, question: str) -> np.ndarray:
        """Return the score of each text, (number of texts,); 0 if it shares no word with the question."""
        known = getattr(self._retriever, "vocab_dict", {})
        words = [word for found in self._tokenize([words_of(question)]) for word in found if word in known]
        return self._retriever.get_scores(words) if words else np.zeros(self._num_texts, np.float32)


def ranking(scores: np.ndarray, above: float = -np.inf) -> np.ndarray:
    """Return the numbers of the texts whose score is above a bound, the highest score first; equal scores keep their order."""
    order = np.argsort(-scores, kind="stable")
    return order[scores[order] > above]


def reciprocal_rank_fusion(rankings: Sequence[Iterable[int]], k: int = 60) -> list[tuple[int, float]]:
    """Fuse rankings by the sum of 1 / (k + rank); the first rank is 1, and a ranking without a text adds nothing to its sum.

    Source: Cormack, Clarke and Buettcher, "Reciprocal rank fusion outperforms Condorcet and individual rank learning methods",
    SIGIR 2009, with their k.

    Args:
        rankings: Numbers of texts, the best first.
        k: Constant that lowers the weight of the first ranks.

    Returns:
        Number and sum of each text, the highest sum first. Equal sums keep the order of the first ranking, then of the second.
    """
    sums: dict[int, float] = {}
    for each in rankings:
        for rank, number in enumerate(each, 1):
            sums[int(number)] = sums.get(int(number), 0.0) + 1 / (k + rank)
    return sorted(sums.items(), key=lambda item: item[1], reverse=True)
