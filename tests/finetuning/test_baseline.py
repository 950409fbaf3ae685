"""The scores of TF-IDF beside those of a fit are those that scikit-learn gives on the same rows and folds."""

import json

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, f1_score, mean_squared_error
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold, cross_val_predict
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline

from neobert_hf.finetuning import Classifier, baseline
from neobert_hf.finetuning.baseline import tfidf_outputs
from neobert_hf.finetuning.head import choose_strength
from neobert_hf.finetuning.texts import MULTI, SINGLE

TEXTS = [f"{word} {name}" for name in ("invoice", "screen", "parcel") for word in ("my", "the sea", "a new", "an old")]
CLASSES = [text.split()[-1] for text in TEXTS]
HELD_OUT = ["this parcel", "my screen and my mouse", "that old parcel", "an old invoice"]
NUMBERS = [len(text) / 2 for text in TEXTS]
TFIDF = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2))


def chosen(texts, labels):
    """The pipeline of scikit-learn, with the strength that a grid search over it finds."""
    last, name, folds, score = LogisticRegression(), "C", StratifiedKFold, "neg_log_loss"
    if not isinstance(labels[0], str):
        last, name, folds, score = OneVsRestClassifier(last), "estimator__C", KFold, "f1_micro"
    if isinstance(labels[0], float):
        last, name, score = Ridge(), "alpha", "neg_mean_squared_error"
    model = make_pipeline(TFIDF, last)
    grid = {f"{model.steps[-1][0]}__{name}": [0.1, 1, 10, 100]}
    search = GridSearchCV(model, grid, cv=folds(3, shuffle=True, random_state=0), scoring=score)
    return model.set_params(**search.fit(texts, labels).best_params_)


@pytest.mark.parametrize("kind", ["one class", "folds", "numbers"])
def test_the_scores_beside_those_of_a_fit_are_those_of_scikit_learn(start, tmp_path, kind):
    labels, held_out = (NUMBERS, [1.5, 2.0, 7.5, 3.0]) if kind == "numbers" else (CLASSES, CLASSES[8:9] + CLASSES[4:7])
    options = {"max_steps": 1, "learning_rate": 0.0, "use_cpu": True, "output_dir": str(tmp_path)}
    job = Classifier(start, 16).fit(TEXTS, labels, (HELD_OUT, held_out), is_held_out=kind == "folds", **options)
    found = chosen(TEXTS, labels).fit(TEXTS, labels).predict(HELD_OUT)
    if kind == "folds":
        folds, held_out = StratifiedKFold(5, shuffle=True, random_state=0), labels + held_out
        model = chosen(TEXTS + HELD_OUT, held_out)
        found = cross_val_predict(model, TEXTS + HELD_OUT, held_out, cv=folds)
    name, metric = ("mse", mean_squared_error) if kind == "numbers" else ("accuracy", accuracy_score)
    job.save(tmp_path)
    (record,) = json.loads((tmp_path / "training.json").read_text())["scores"]
    score = json.loads((tmp_path / "eval_results.json").read_text())[f"eval_tfidf_{name}"]
    assert score == record["tfidf"][name] == pytest.approx(metric(held_out, found), rel=1e-4)


def test_several_classes_have_a_regression_each_of_a_strength_that_finds_rare_classes_and_a_pair_is_one_text():
    things = ["sea", "fox", "house", "tree", "road", "hill", "cat", "shop", "lamp"]
    texts = [f"{first} {thing} number {i}" for i in range(3) for first in ("my", "an old") for thing in things]
    columns = np.array([[word in text.split() for word in things] for text in texts], int)
    found = tfidf_outputs([tuple(text.split(" number ")) for text in texts], columns, MULTI, 9, texts)
    short = [text.replace(" number ", " ") for text in texts]
    assert np.array_equal(found > 0, chosen(short, columns).fit(short, columns).predict(texts) == 1)
    weak = make_pipeline(TFIDF, OneVsRestClassifier(LogisticRegression())).fit(short, columns).predict(texts)
    assert f1_score(columns, found > 0, average="micro") > f1_score(columns, weak, average="micro")


def test_rare_classes_and_a_part_of_many_rows_choose_a_strength(monkeypatch):
    seen = []
    choose = lambda *given: seen.append(len(given[1])) or choose_strength(*given)  # noqa: E731
    monkeypatch.setattr(baseline, "choose_strength", choose)
    labels = np.array([2, 3, 3, *[0, 1] * 16])
    for most in (baseline.MOST_COMPARED, 2000):  # 35 texts of 10 characters, times 7
        monkeypatch.setattr(baseline, "MOST_COMPARED", most)
        assert tfidf_outputs(["some words"] * 35, labels, SINGLE, 4, ["words"]).shape == (1, 4)
    assert seen == [35, 18]


def test_what_has_no_words_or_too_many_characters_is_left_out_with_a_word(monkeypatch):
    labels = np.array([0, 1])
    with pytest.raises(ValueError, match="empty vocabulary"):
        tfidf_outputs(["a b", "!"], labels, SINGLE, 2, ["a"])
    monkeypatch.setattr(baseline, "MOST_WORK", 59)  # 12 characters times 5
    with pytest.raises(ValueError, match="12 characters are too many"):
        tfidf_outputs(["a house", "a sea"], labels, SINGLE, 2, ["a"])
