"""The scores of TF-IDF beside those of a fit are those that scikit-learn gives on the same rows and folds."""

import json

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, mean_squared_error
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline

from neobert_hf.finetuning import Classifier, baseline
from neobert_hf.finetuning.baseline import tfidf_outputs
from neobert_hf.finetuning.texts import SINGLE

TEXTS = [f"{word} {name}" for name in ("invoice", "screen", "parcel") for word in ("my", "the sea", "a new", "an old")]
CLASSES = [text.split()[-1] for text in TEXTS]
HELD_OUT = ["this parcel", "my screen and my mouse", "that old parcel", "an old invoice"]
NUMBERS = [len(text) / 2 for text in TEXTS]
TFIDF = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2))


@pytest.mark.parametrize("kind", ["one class", "folds", "numbers"])
def test_the_scores_beside_those_of_a_fit_are_those_of_scikit_learn(start, tmp_path, kind):
    labels, held_out = (NUMBERS, [1.5, 2.0, 7.5, 3.0]) if kind == "numbers" else (CLASSES, CLASSES[8:9] + CLASSES[4:7])
    model = make_pipeline(TFIDF, Ridge() if kind == "numbers" else LogisticRegression())
    options = {"max_steps": 1, "learning_rate": 0.0, "use_cpu": True, "output_dir": str(tmp_path)}
    job = Classifier(start, 16).fit(TEXTS, labels, (HELD_OUT, held_out), is_held_out=kind == "folds", **options)
    found = model.fit(TEXTS, labels).predict(HELD_OUT)
    if kind == "folds":
        folds, held_out = StratifiedKFold(5, shuffle=True, random_state=0), labels + held_out
        found = cross_val_predict(model, TEXTS + HELD_OUT, held_out, cv=folds)
    name, metric = ("mse", mean_squared_error) if kind == "numbers" else ("accuracy", accuracy_score)
    job.save(tmp_path)
    (record,) = json.loads((tmp_path / "training.json").read_text())["scores"]
    score = json.loads((tmp_path / "eval_results.json").read_text())[f"eval_tfidf_{name}"]
    assert score == record["tfidf"][name] == pytest.approx(metric(held_out, found), rel=1e-4)


def test_several_classes_have_a_regression_each_and_a_pair_is_one_text():
    columns = np.array([["my" in text, "old" in text] for text in TEXTS], int)
    found = tfidf_outputs([tuple(text.split()[-2:]) for text in TEXTS], columns, "multi_label_classification", 2, TEXTS)
    short = [" ".join(text.split()[-2:]) for text in TEXTS]
    model = make_pipeline(TFIDF, LogisticRegression())
    expected = np.stack([model.fit(short, column).predict(TEXTS) for column in columns.T], 1)
    assert np.array_equal(found > 0, expected == 1)


def test_what_has_no_words_or_too_many_characters_is_left_out_with_a_word(monkeypatch):
    labels = np.array([0, 1])
    assert "no words" in tfidf_outputs(["a b", "!"], labels, SINGLE, 2, ["a"])
    monkeypatch.setattr(baseline, "MOST_WORK", 59)  # 12 characters times 5
    assert "12 characters are too many" in tfidf_outputs(["a house", "a sea"], labels, SINGLE, 2, ["a"])
