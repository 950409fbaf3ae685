"""The best answer of all windows of a text, by the logits of a model; without torch, for exported models too."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

MAX_ANSWER_TOKENS = 64


def best_answers(
    start_logits: Iterable[np.ndarray],
    end_logits: Iterable[np.ndarray],
    windows: Mapping[str, Iterable],
    contexts: Sequence[str],
    max_answer_tokens: int = MAX_ANSWER_TOKENS,
) -> list[dict]:
    """Return the best span of all windows of each question.

    Args:
        start_logits: For each window, the logits of the first token of the answer; columns behind the window are ignored.
        end_logits: The same for the last token.
        windows: As `cut_windows` returns them, for rows numbered from 0.
        contexts: The context of each question.
        max_answer_tokens: Length of the longest answer.

    Returns:
        For each question `answer`, `score` and `start`, where the answer begins in the context. The score is the sum of the
        logits of the span minus the sum for [CLS] in the same window, which stands for no answer. If the score is not above 0,
        the answer is empty and `start` is None.

    Raises:
        FloatingPointError: The logits are not finite.
    """
    best = [(-np.inf, 0, 0)] * len(contexts)
    columns = windows["row"], windows["offsets"], windows["first"]
    for row, offsets, first, start, end in zip(*columns, start_logits, end_logits):
        own = slice(first, first + len(offsets))
        scores = start[own][:, None] + end[own] - (start[0] + end[0])
        places = np.arange(len(offsets))
        lengths = places - places[:, None] + 1
        scores[(lengths < 1) | (lengths > max_answer_tokens)] = -np.inf
        begin, last = np.unravel_index(scores.argmax(), scores.shape)
        score = float(scores[begin, last])
        if not np.isfinite(score):
            raise FloatingPointError(
                f"the score of an answer is {score}; the model has diverged, lower the learning_rate"
            )
        best[row] = max(best[row], (score, offsets[begin][0], offsets[last][1]))
    return [_answer(context, *span) for context, span in zip(contexts, best)]


def _answer(context: str, score: float, start: int, end: int) -> dict:
    if score <= 0:
        return {"answer": "", "score": score, "start": None}
    while end < len(context) and unicodedata.category(context[end]).startswith("M"):
        end += 1  # an accent that is a character of its own, which a tokenizer drops
    return {"answer": context[start:end], "score": score, "start": start}
