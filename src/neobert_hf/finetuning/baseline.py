"""What TF-IDF with a linear model reaches on the same held-out rows: words and pairs of words, without a network."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_val_predict
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline

from .head import folds_of
from .texts import MULTI, REGRESSION, SINGLE

# Characters, times the classes and 3 more for what does not depend on them, times the trainings. One unit of this product takes a
# core of an AMD EPYC 50 ns (1,000 questions of 77 classes) to 85 ns (2,000 texts of 1,400 characters of 20 classes): at most 4 s.
MOST_WORK = 50_000_000


def tfidf_outputs(
    texts: Sequence,
    labels: np.ndarray,
    problem_type: str,
    num_outputs: int,
    held_out: Sequence | None,
) -> np.ndarray | str:
    """Return what the baseline predicts, in the form of logits; or a sentence that says why it is left out.

    Args:
        texts: N training texts; a pair is read as one text.
        labels: (N,) class ids or numbers, or (N, C) zeros and ones.
        problem_type: As in the config of a model.
        num_outputs: Number of logits.
        held_out: Other texts; None predicts the training texts, each by the other folds of `cross_validated`.
    """
    texts = _joined(texts)
    num_trainings = 1
    if not held_out:
        folds = folds_of(labels)
        num_trainings = folds.get_n_splits()
    length = sum(map(len, texts))
    if length * (num_outputs + 3) * num_trainings > MOST_WORK:
        return f"TF-IDF is left out: {length:,} characters are too many for a few seconds"
    logistic = LogisticRegression(max_iter=1000)
    last = {
        REGRESSION: Ridge(),
        SINGLE: logistic,
        MULTI: OneVsRestClassifier(logistic),
    }[problem_type]
    # float32 takes half of the time
    model = make_pipeline(TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), dtype=np.float32), last)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The least populated class|Label .* is present in all")
            if held_out:
                found = model.fit(texts, labels).predict(_joined(held_out))
            else:
                found = cross_val_predict(model, texts, labels, cv=folds)
    except ValueError as error:
        if "empty vocabulary" not in str(error):
            raise
        return "TF-IDF is left out: the texts have no words of two letters"
    if problem_type == SINGLE:
        return np.eye(num_outputs)[found]
    if problem_type == MULTI:
        return 2 * found - 1
    return found


def _joined(texts: Sequence) -> list[str]:
    return [" ".join(text) if isinstance(text, tuple) else text for text in texts]
