"""The last layer that is fitted on frozen vectors, against pipelines of scikit-learn."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.special import expit, softmax
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import BatchEncoding

from neobert_hf import NeoBERTForSequenceClassification
from neobert_hf.finetuning import Classifier, classifier, head
from neobert_hf.finetuning.texts import MULTI, REGRESSION, SINGLE

NOISE = np.random.default_rng(0)
VECTORS = NOISE.normal(3, [0.1, 1, 10, 100], (60, 4))  # of very different scales
CLASSES = (VECTORS[:, 0] > 3).astype(int) + (VECTORS[:, 1] > 4)
BOTH = np.stack([VECTORS[:, 0] > 3, VECTORS[:, 2] > 5], -1).astype(int)


def scaled(model):
    return make_pipeline(StandardScaler(), model)


def test_one_class_has_the_probabilities_of_scikit_learn():
    for labels in (CLASSES, CLASSES > 0):
        oracle = scaled(LogisticRegression(C=0.1, max_iter=1000)).fit(VECTORS, labels)
        weight, bias = head.fit_linear(VECTORS, labels.astype(int), len(np.unique(labels)), SINGLE, 0.1)
        found = softmax(VECTORS @ weight.numpy().T + bias.numpy(), -1)
        np.testing.assert_allclose(found, oracle.predict_proba(VECTORS), atol=1e-4)  # float32, values up to 300


def test_a_weighted_row_counts_as_often_as_its_weight_says():
    times = np.arange(60) % 4 + 1
    oracle = scaled(LogisticRegression(C=0.1, max_iter=1000)).fit(VECTORS.repeat(times, 0), CLASSES.repeat(times))
    weight, bias = head.fit_linear(VECTORS, CLASSES, 3, SINGLE, 0.1, times)
    found = softmax(VECTORS @ weight.numpy().T + bias.numpy(), -1)
    np.testing.assert_allclose(found, oracle.predict_proba(VECTORS), atol=1e-4)


def test_the_weighted_loss_is_a_mean_over_all_rows_of_a_step_and_plain_in_an_evaluation():
    ids, weights, logits = CLASSES[:6], np.array([0, 1, 2, 0.5, 0.25, 2.25]), torch.tensor(VECTORS[:6, :3])
    losses = -np.log(softmax(VECTORS[:6, :3], -1)[np.arange(6), ids])
    rows = torch.tensor(np.stack([ids, weights], -1))
    halves = np.split(np.arange(6), [2])
    parts = [head.weighted_loss(SimpleNamespace(logits=logits[half]), rows[half], 12) for half in halves]
    assert sum(parts).item() == pytest.approx(np.mean(weights * losses))
    assert head.weighted_loss(SimpleNamespace(logits=logits), torch.tensor(ids)).item() == pytest.approx(losses.mean())


def test_several_classes_have_the_probabilities_of_scikit_learn():
    oracle = scaled(OneVsRestClassifier(LogisticRegression(C=0.1, max_iter=1000))).fit(VECTORS, BOTH)
    weight, bias = head.fit_linear(VECTORS, BOTH, 2, MULTI, 0.1)
    found = expit(VECTORS @ weight.numpy().T + bias.numpy())
    np.testing.assert_allclose(found, oracle.predict_proba(VECTORS), atol=1e-4)


def test_numbers_are_those_of_a_ridge_regression():
    numbers = VECTORS @ [1, 2, 0.1, 0.01] + NOISE.normal(size=60)
    oracle = scaled(RidgeCV(np.logspace(-1, 5, 7))).fit(VECTORS, numbers)
    weight, bias = head.fit_linear(VECTORS, numbers, 1, REGRESSION)
    np.testing.assert_allclose((VECTORS @ weight.numpy().T + bias.numpy())[:, 0], oracle.predict(VECTORS), atol=1e-3)


def test_the_logits_of_a_cross_validation_are_those_of_scikit_learn_also_with_a_rare_class():
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    oracle = scaled(LogisticRegression(C=0.1, max_iter=1000))
    wanted = cross_val_predict(oracle, VECTORS, CLASSES, cv=folds, method="predict_proba")
    np.testing.assert_allclose(softmax(head.cross_validated(VECTORS, CLASSES, 3, 0.1), -1), wanted, atol=1e-4)
    rare = np.array([3, *CLASSES[1:]])
    assert (softmax(head.cross_validated(VECTORS, rare, 4, 0.1), -1)[:, 3] < 0.1).all()


def test_classes_that_no_row_or_every_row_has_are_improbable_or_probable():
    weight, bias = head.fit_linear(VECTORS, CLASSES, 4, SINGLE, 0.1)
    assert (softmax(VECTORS @ weight.numpy().T + bias.numpy(), -1)[:, 3] < 0.05).mean() > 0.9
    labels = np.stack([CLASSES > 0, CLASSES < 0, CLASSES >= 0], -1).astype(int)
    weight, bias = head.fit_linear(VECTORS, labels, 3, MULTI, 0.1)
    assert not weight[1:].any()
    np.testing.assert_allclose(expit(bias[1:].numpy()), [1 / 121, 120 / 121], atol=1e-6)


def test_the_vectors_before_the_last_layer_are_those_of_evaluation(tiny_config):
    """Their product with the layer is the logits without dropout."""
    tiny_config.classifier_dropout = 0.5
    model, ids = NeoBERTForSequenceClassification(tiny_config).train(), [[2, 5, 6, 3], [2, 7, 8, 3], [2, 9, 9, 3]]

    def collate(rows):
        return BatchEncoding({"input_ids": torch.tensor([row["input_ids"] for row in rows])})

    trainer = SimpleNamespace(model=model, args=SimpleNamespace(eval_batch_size=2), data_collator=collate)
    vectors = head.inputs_of_last_layer(trainer, Dataset.from_dict({"input_ids": ids, "label": [0, 1, 0]}))
    with torch.no_grad():
        found, wanted = model.classifier(torch.from_numpy(vectors)), model.eval()(torch.tensor(ids)).logits
    torch.testing.assert_close(found, wanted)


def test_the_strength_is_large_for_a_clear_signal_and_small_for_noise():
    vectors = NOISE.normal(size=(90, 30))
    clear, noise = (vectors[:, 0] > 0).astype(int), NOISE.integers(0, 2, 90)
    assert head.choose_strength(vectors, clear, SINGLE) > head.choose_strength(vectors, noise, SINGLE)


@pytest.mark.parametrize("labels", [[0, 1], [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 2]])
def test_the_strength_of_too_few_rows_for_a_comparison_is_the_default(labels):
    assert head.choose_strength(NOISE.normal(size=(len(labels), 3)), np.array(labels), SINGLE) == 0.1


TEXTS = [f"{word} {thing}" for thing in ("invoice", "screen", "parcel") for word in ("my", "the", "new", "old", "that")]
WORDS = [text.split()[-1] for text in TEXTS]
FROZEN = {"max_steps": 1, "learning_rate": 0.0, "use_cpu": True, "disable_tqdm": True}


def test_the_last_layer_stays_weak_before_a_short_training(start, monkeypatch):
    def logits(strength):
        monkeypatch.setattr(classifier, "choose_strength", lambda *_: strength)
        return Classifier(start, 16, verbose=False).fit(TEXTS, WORDS, **FROZEN).outputs(TEXTS)

    weak = logits(head.WEAK)
    np.testing.assert_array_equal(logits(1.0), weak)
    assert not np.array_equal(logits(head.WEAK / 10), weak)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [WORDS, [[word, "thing"] for word in WORDS], [len(word) + 0.5 for word in WORDS]])
def test_the_last_layer_alone_learns_with_a_learning_rate_of_zero_and_frozen_vectors_have_its_scores(labels):
    def error(head_first):
        classifier = Classifier(head_first=head_first).fit(TEXTS, labels, (TEXTS, labels), **FROZEN)
        scores = classifier._findings.scores["validation"]
        assert scores.get("frozen", scores["metrics"]) == pytest.approx(scores["metrics"], abs=1e-6)
        found = classifier.predict(TEXTS)
        return sum(abs(a - b) if isinstance(b, float) else set(a) != set(b) for a, b in zip(found, labels)) / len(TEXTS)

    assert error(True) < 0.1 < error(False)


def test_the_score_of_frozen_vectors_does_not_change_the_rows_and_the_dropout_of_the_first_step():
    options = FROZEN | {"learning_rate": 1e-3, "per_device_train_batch_size": 4}
    fits = [Classifier(verbose=False).fit(TEXTS, WORDS, rows, **options) for rows in (None, (TEXTS, WORDS))]
    np.testing.assert_array_equal(fits[0].outputs(TEXTS), fits[1].outputs(TEXTS))


@pytest.mark.slow
def test_a_second_fit_keeps_the_head_that_the_saved_model_has(tmp_path):
    few = Classifier().fit(TEXTS, WORDS, **FROZEN)
    assert few.model_.config.classifier_pooling == "mean" and few.predict(TEXTS) == WORDS
    few.save(tmp_path / "saved")
    again = Classifier(tmp_path / "saved").fit(TEXTS, WORDS, **FROZEN)
    np.testing.assert_allclose(again.outputs(TEXTS), few.outputs(TEXTS), atol=1e-5)
