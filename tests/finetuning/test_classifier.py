"""Classification and regression: metrics of scikit-learn and by hand, and runs of the example that learn a rule."""

import ast
import csv
import json
import random
import re
from pathlib import Path

import finetune_classifier
import numpy as np
import pytest
from conftest import SENTENCE, run_main
from glue import TABLE_6
from transformers import pipeline

from neobert_hf import NeoBERTConfig, NeoBERTForSequenceClassification
from neobert_hf.finetuning import Classifier, label_metrics
from neobert_hf.finetuning.findings import check_finite
from neobert_hf.finetuning.plan import Plan
from neobert_hf.finetuning.texts import MULTI, REGRESSION, SINGLE

WORDS = SENTENCE.split()


def run(model_folder, out, *arguments):
    options = ("--use_cpu", "true", "--learning_rate", "3e-3", "--report_to", "none", "--disable_tqdm", "true")
    given = ("--model_name_or_path", model_folder, "--output_dir", out, *options, *arguments)
    printed = run_main(finetune_classifier, *given)
    files = {file.name: json.loads(file.read_text()) for file in out.glob("*_results.json")}
    return printed, {name: value for metrics in files.values() for name, value in metrics.items()}


def write_csv(file, rows):
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return file


def read_csv(file):
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS[:9], k=4)) + rng.choice([" red", " old", " red old", ""]) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.compat
def test_several_classes_are_learned_and_a_saved_folder_says_which_words_are_there(model_folder, tmp_path):
    def rows(count, seed):
        return [
            {"text": text, "label": ";".join(word for word in ("old", "red") if word in text.split()), "number": i}
            for i, text in enumerate(texts(count, seed))
        ]

    train, test = (write_csv(tmp_path / f"{seed}.csv", rows(300, seed)) for seed in (0, 1))
    options = ("--train_file", train, "--test_file", test, "--label_separator", ";")
    printed, metrics = run(model_folder, tmp_path / "out", *options)
    assert metrics["eval_f1"] == metrics["eval_f1_micro"] == metrics["test_accuracy"] == 1.0
    assert "lowest f1: old 1.000, red 1.000" in printed
    assert "old      1.000     1.000     1.000" in (tmp_path / "out/classification_report_test.txt").read_text()
    found = read_csv(tmp_path / "out/predictions.csv")
    assert [row["prediction"] for row in found] == [row["label"] for row in found]
    assert [int(row["number"]) for row in found] == list(range(300))
    for row in found:
        for word in ("old", "red"):
            assert (float(row[f"probability_{word}"]) > 0.5) == (word in row["text"].split())
    classify = pipeline("text-classification", str(tmp_path / "out"), top_k=None)
    (entries,) = classify(["the fox red old"])
    scores = {entry["label"]: entry["score"] for entry in entries}
    assert min(scores.values()) > 0.5, "probabilities of several classes do not compete"


@pytest.mark.slow
@pytest.mark.compat
def test_a_regression_learns_numbers_in_the_unit_of_the_file(model_folder, tmp_path):
    """A price of 200,000.5, more with one word and less with another. Adam would need millions of steps to reach such numbers."""

    def rows(count, seed):
        prices = [(text, 200_000.5 + 1e5 * ("red" in text) - 5e4 * ("old" in text)) for text in texts(count, seed)]
        return [{"text": text, "price": price} for text, price in prices]

    train, test = (write_csv(tmp_path / f"{seed}.csv", rows(300, seed)) for seed in (0, 1))
    options = ("--train_file", train, "--test_file", test, "--label_column", "price")
    printed, metrics = run(model_folder, tmp_path / "out", *options, "--predictions_file", tmp_path / "found.jsonl")
    assert "so this is a regression" in printed
    assert metrics["test_pearson"] > 0.9 and metrics["test_spearman"] > 0.8
    assert metrics["test_mse"] < 30_000**2, "the standard deviation of the prices is 56,000"
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    errors = [row["prediction"] - float(row["price"]) for row in found]
    assert np.mean(np.square(errors)) == pytest.approx(metrics["test_mse"], rel=1e-4)  # float32 labels
    (answer,) = pipeline("text-classification", str(tmp_path / "out"))(found[0]["text"])
    assert answer == {"label": "price", "score": pytest.approx(found[0]["prediction"], rel=1e-5)}


@pytest.mark.slow
@pytest.mark.compat
def test_a_saved_folder_predicts_without_training(model_folder, tmp_path):
    rows = [{"text": text, "label": ("no", "yes")["red" in text]} for text in texts(60)]
    train = write_csv(tmp_path / "train.csv", rows)
    _, trained = run(model_folder, tmp_path / "out", "--train_file", train, "--test_file", train)
    first = read_csv(tmp_path / "out/predictions.csv")
    report = (tmp_path / "out/classification_report_test.txt").read_text()
    assert re.search(r"in columns:\n\n +no +yes\n[- ]+\nno +\d+ +0\nyes +0 +\d+\n$", report), (
        "all predictions are right"
    )

    unlabelled = write_csv(tmp_path / "new.csv", [{"text": row["text"]} for row in rows])
    options = ("--test_file", unlabelled, "--predictions_file", tmp_path / "new/found.csv")
    printed, metrics = run(tmp_path / "out", tmp_path / "again", *options)
    assert "no test row has a label in its column (label_column), so there are no metrics" in printed
    assert metrics == {} and "learning_rate" not in printed
    again = read_csv(tmp_path / "new/found.csv")
    for name in ("prediction", "probability_no", "probability_yes"):
        assert [row[name] for row in again] == [row[name] for row in first]

    _, metrics = run(tmp_path / "out", tmp_path / "evaluated", "--test_file", train)
    assert trained["test_tfidf_accuracy"] > 0.9  # a saved folder has no training rows
    assert metrics == {name: trained[name] for name in trained if name.startswith("test_") and "tfidf" not in name}
    assert not list((tmp_path / "evaluated").glob("*.safetensors"))


@pytest.mark.slow
def test_all_of_few_rows_are_trained_on_and_a_cross_validation_gives_the_metrics(model_folder, tmp_path):
    rows = [{"text": text, "label": ("no", "yes")["red" in text]} for text in texts(60)]
    rows[-1] = rows[0]
    train = write_csv(tmp_path / "train.csv", rows)
    printed, metrics = run(model_folder, tmp_path / "out", "--train_file", train)
    record = json.loads((tmp_path / "out/training.json").read_text())
    assert "60 rows are few: all of them are trained on" in printed and record["rows"] == {"train.csv": 60}
    (scores,) = record["scores"]
    assert (scores["dataset"], scores["split"]) == ("train.csv", "cross-validation of the last layer")
    assert 0.7 < metrics["eval_accuracy"] == scores["metrics"]["accuracy"] <= 1
    assert "1 of 60 rows repeat the text of another row, so the scores are too good" in printed
    printed, metrics = run(model_folder, tmp_path / "other", "--train_file", train, "--validation_file", train)
    assert re.search(r"validation, 60 rows +accuracy", printed) and "are few: all" not in printed


@pytest.mark.slow
def test_the_pooling_is_an_option_that_the_saved_model_keeps(model_folder, tokenizer, tmp_path):
    rows = [{"text": text, "label": "red" if "red" in text else "none"} for text in texts(300)]
    train = write_csv(tmp_path / "train.csv", rows)
    _, metrics = run(model_folder, tmp_path / "mean", "--train_file", train, "--classifier_pooling", "mean")
    assert metrics["eval_accuracy"] > 0.95  # "red" is at different places, and the mean finds it
    saved = NeoBERTForSequenceClassification.from_pretrained(tmp_path / "mean")
    assert saved.config.classifier_pooling == "mean"
    test = ("--test_file", train, "--output_dir", tmp_path / "predictions")
    assert run(tmp_path / "mean", tmp_path / "predictions", *test)[1]["test_accuracy"] > 0.95


def test_a_model_that_is_no_classifier_does_not_predict(model_folder, tmp_path):
    test = write_csv(tmp_path / "test.csv", [{"text": "fox"}])
    with pytest.raises(SystemExit, match=r"is not a trained classifier; give the folder of one .model_name_or_path"):
        run(model_folder, tmp_path / "out", "--test_file", test)
    assert not (tmp_path / "out").exists()


def test_the_labels_of_a_trained_model_are_those_of_its_config(model_folder, tokenizer, tmp_path):
    names = {0: "old", 1: "new"}
    cases = ((MULTI, names, ["new"], [0, 1]), (None, names, "new", 1), (None, {0: "price"}, 2.5, 2.5))
    for problem_type, labels, label, encoded in cases:
        config = NeoBERTConfig.from_pretrained(model_folder, id2label=labels, problem_type=problem_type)
        NeoBERTForSequenceClassification(config).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        assert Classifier(tmp_path).encode([label]) == [encoded]
        found = Classifier(tmp_path)
        assert found.classes_.tolist() == sorted(labels.values())
        assert found.problem_type == problem_type or (SINGLE if len(labels) > 1 else REGRESSION)


@pytest.mark.slow
def test_the_length_of_the_training_is_the_length_of_the_predictions(model_folder, tmp_path):
    """The word that decides is the fifth; with four tokens of text the classes cannot be told apart."""
    rows = [{"text": f"the fox the fox {word}", "label": word} for _ in range(60) for word in ("red", "old")]
    train = write_csv(tmp_path / "train.csv", rows)
    run(model_folder, tmp_path / "out", "--train_file", train, "--max_seq_length", "6", "--num_train_epochs", "1")
    _, metrics = run(tmp_path / "out", tmp_path / "again", "--test_file", train)
    assert metrics["test_accuracy"] == 0.5


LABELS, LOGITS = np.array([0, 1, 1, 0, 1, 1]), np.array([[2, 1], [1, 2], [2, 1], [3, 1], [0, 1], [0, 2]])


def test_metrics_of_two_classes_by_hand():
    """Of class 0, two of three predictions are right and none is missed; of class 1, three of four rows are found."""
    found = label_metrics(SINGLE, LABELS, LOGITS)
    assert found["accuracy"] == 5 / 6
    assert found["f1"] == pytest.approx((2 * (2 / 3) / (5 / 3) + 2 * (3 / 4) / (7 / 4)) / 2)
    assert found["matthews"] == pytest.approx((3 * 2 - 1 * 0) / np.sqrt(3 * 4 * 2 * 3))
    assert "matthews" not in label_metrics(SINGLE, LABELS, np.pad(LOGITS, ((0, 0), (0, 1))))


def test_metrics_of_several_classes_by_hand():
    labels, logits = np.array([[1, 0], [1, 1], [0, 0]]), np.array([[1, 1], [1, 1], [-1, -1]])
    found = label_metrics(MULTI, labels, logits)
    assert found == pytest.approx({"accuracy": 2 / 3, "f1": (1 + 2 / 3) / 2, "f1_micro": 2 * 3 / (4 + 3)})


def test_metrics_of_numbers_by_hand():
    labels, logits = np.array([1.0, 2, 3]), np.array([[2.0], [4], [12]])
    deviations, errors = (logits[:, 0] - 6, np.array([-1, 0, 1])), np.array([1, 2, 9])
    pearson = (deviations[0] @ deviations[1]) / np.sqrt((deviations[0] ** 2).sum() * 2)
    expected = {"pearson": pearson, "spearman": 1, "mse": (errors**2).mean()}
    assert label_metrics(REGRESSION, labels, logits) == pytest.approx(expected)
    constant = label_metrics(REGRESSION, labels, np.ones((3, 1)))
    assert constant["pearson"] == constant["spearman"] == 0


def rows_labels(rows, kind):
    return [LABELS_OF[kind](text) for text in rows]


LABELS_OF = {
    SINGLE: lambda text: "red" if "red" in text else "none",
    MULTI: lambda text: [word for word in ("old", "red") if word in text.split()],
    REGRESSION: lambda text: 10.5 * ("red" in text) - 2.25 * ("old" in text),
}
FAST = {"use_cpu": True, "learning_rate": 3e-3, "disable_tqdm": True, "max_steps": 8}


def test_a_fit_without_a_folder_learns_and_leaves_no_file(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{start} {word}" for start in WORDS[:9] for word in ("red", "old")] * 8
    options = FAST | {"max_steps": 20}
    classifier = Classifier(model_folder, max_seq_length=16).fit(rows, rows_labels(rows, SINGLE), **options)
    assert classifier.predict(["dog red", "dog old"]) == ["red", "none"]
    assert classifier.evaluate(rows, rows_labels(rows, SINGLE)) == {"accuracy": 1, "f1": 1, "matthews": 1}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [MULTI, REGRESSION])
def test_predictions_scores_and_metrics_of_other_labels_belong_together(model_folder, kind):
    rows = texts(40)
    labels = rows_labels(rows, kind)
    classifier = Classifier(model_folder).fit(rows, labels, **FAST)
    found = classifier.predict(rows)
    assert classifier.problem_type == kind and hasattr(classifier, "predict_proba") == (kind == MULTI)
    if kind == MULTI:
        scores = classifier.predict_proba(rows)
        assert classifier.classes_.tolist() == ["old", "red"]
        assert found == [[name for name, score in zip(("old", "red"), row) if score > 0.5] for row in scores]
        accuracy = np.mean([a == b for a, b in zip(found, labels)])
        assert classifier.evaluate(rows, labels)["accuracy"] == classifier.score(rows, labels) == accuracy
        assert classifier.score(rows[:2], [["new"], found[1]]) == 0.5, "an unknown class is an error of the model"
    else:
        assert found == classifier.outputs(rows)[:, 0].tolist() and all(type(number) is float for number in found)
        error = np.mean(np.subtract(found, labels) ** 2)
        assert classifier.evaluate(rows, labels)["mse"] == pytest.approx(error, rel=1e-4)
        assert classifier.score(rows, labels) == pytest.approx(1 - error / np.var(labels), rel=1e-4)


def test_a_fit_removes_spaces_around_labels_and_names_of_classes_and_says_what_is_odd(model_folder, capsys):
    rows, labels = ["fox", " fox", "dog", "the"] * 2, ["a ", "\u200bb", " A", "b"] * 2
    for classes in (None, ["b ", "a", "A"]):
        job = Classifier(model_folder).fit(rows, labels, classes=classes, **FAST)
        assert job.classes_.tolist() == ["A", "a", "b"] and (not classes or job._classes == ["b", "a", "A"])
        out = capsys.readouterr().out
        assert "'a' (2) and 'A' (2)" in out and "several labels (1): 'fox' {'a': 2, 'b': 2}" in out and "--" not in out


def test_the_squared_error_during_the_training_has_the_unit_of_the_file(model_folder):
    numbers = [10.0, 20.0, 40.0]
    classifier = Classifier(model_folder, max_seq_length=8)
    classifier._start()
    classifier.problem_type, classifier._names = REGRESSION, ["price"]
    classifier._plan = Plan([], None, mean=float(np.mean(numbers)), deviation=float(np.std(numbers)))
    scaled = np.array(classifier._rows(["fox"] * 3, numbers)["label"])
    assert scaled.mean() == pytest.approx(0, abs=1e-6) and scaled.std() == pytest.approx(1)
    predictions = type("Predictions", (), {"label_ids": scaled, "predictions": np.zeros((3, 1))})
    assert classifier._metrics_of_epoch(classifier._plan, predictions, None)["mse"] == pytest.approx(np.var(numbers))


def test_a_model_that_has_diverged_is_refused():
    for outputs in (np.array([[0, np.nan]]), [np.ones((2, 3)), np.full((1, 3), np.inf)]):
        with pytest.raises(FloatingPointError, match="the model has diverged, lower the learning_rate"):
            check_finite(outputs)


def test_the_table_of_learning_rates_on_the_page_is_that_of_the_paper():
    page = (Path(__file__).parents[2] / "examples/paper/README.md").read_text("utf-8")
    rows = re.findall(r"^\| ([A-Za-z\d-]+) \| .* \| (.*) \| (.*) \|$", page, re.MULTILINE)
    known = {task.lower().replace("-", ""): columns for task, *columns in rows if "," in columns[0]}
    assert {task: tuple(map(ast.literal_eval, columns)) for task, columns in known.items()} == TABLE_6
