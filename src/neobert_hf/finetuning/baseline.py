"""What TF-IDF with a linear model reaches on the same held-out rows: words and pairs of words, without a network."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from sklearn.base import clone
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline

from .head import LINEAR, choose_strength, folds_of
from .texts import MULTI, SINGLE

# Characters, times the classes and 3 more for what does not depend on them, times the trainings. One unit of this product takes a
# core of an AMD EPYC 100 ns (20,000 sentences of 2 classes) to 170 ns (616 questions of 77 classes): at most 8 s.
MOST_WORK = 50_000_000
MOST_COMPARED = 1_000_000  # in each of the 12 trainings that choose the strength: at most 4 s for all of them
STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # C of the logistic regression, alpha of the ridge regression


def tfidf_outputs(
    texts: Sequence,
    labels: np.ndarray,
    problem_type: str,
    num_outputs: int,
    held_out: Sequence | None,
) -> np.ndarray:
    """Return what the baseline predicts, in the form of logits.

    A cross-validation on training rows chooses the strength of the linear model, as that of a last layer on frozen vectors. If
    they are many, it reads a part of them, such as every third.

    Args:
        texts: N training texts; a pair is read as one text.
        labels: (N,) class ids or numbers, or (N, C) zeros and ones.
        problem_type: As in the config of a model.
        num_outputs: Number of logits.
        held_out: Other texts; None predicts the training texts, each by the other folds of `cross_validated`.

    Raises:
        ValueError: It would take too long, or the texts have no words.
    """
    texts = _joined(texts)
    num_trainings = 1
    if not held_out:
        folds = folds_of(labels)
        num_trainings = folds.get_n_splits()
    length = sum(map(len, texts))
    work = length * (num_outputs + 3)
    if work * num_trainings > MOST_WORK:
        raise ValueError(f"{length:,} characters are too many for a few seconds")
    # float32 takes half of the time
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), dtype=np.float32)
    features = words.fit_transform(texts)
    part = slice(None, None, 1 + work // MOST_COMPARED)
    strength = choose_strength(features[part], labels[part], problem_type, STRENGTHS)
    last, name, _ = LINEAR[problem_type]
    model = make_pipeline(words, clone(last).set_params(**{name: strength}))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class|Label .* is present in all")
        if held_out:
            found = model.fit(texts, labels).predict(_joined(held_out))
        else:
            found = cross_val_predict(model, texts, labels, cv=folds)
    if problem_type == SINGLE:
        return np.eye(num_outputs)[found]
    if problem_type == MULTI:
        return 2 * found - 1
    return found


def _joined(texts: Sequence) -> list[str]:
    return [" ".join(text) if isinstance(text, tuple) else text for text in texts]
