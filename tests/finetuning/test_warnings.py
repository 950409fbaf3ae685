"""What a job says beside its scores: those of the trivial answer, truncated texts, rows of the training."""

import json
import re

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import accuracy_score, f1_score, mean_squared_error

from neobert_hf.checkpoints import write_card
from neobert_hf.finetuning import Classifier, QuestionAnswerer, Tagger
from neobert_hf.finetuning.findings import names_of_worse

NOTHING = {"use_cpu": True, "disable_tqdm": True, "max_steps": 1, "learning_rate": 0.0, "report_to": "none"}
TEXTS = ["an old red house", "the sea", "a warm sea", "a quick brown fox"]
CLASSES = ["sea", "sea", "house", "sea"]
TAGS = [["O", "O", "O", "B-X"], ["O"] * 2, ["O"] * 3, ["O"] * 4]
ANSWERS = [{"text": [], "answer_start": []}] * 3 + [{"text": ["a quick"], "answer_start": [0]}]
OF_ANSWERS = {"exact_match": 0.75, "f1": 0.75, "impossible_accuracy": 1, "answerable_f1": 0}


def trained(job, columns, **options):
    return job.fit(*columns, columns, **NOTHING, **options)


@pytest.fixture
def results(tmp_path):
    return lambda: json.loads((tmp_path / "eval_results.json").read_text())


def test_the_trivial_answer_to_classes_is_that_of_scikit_learn(tmp_path, results):
    trained(Classifier(head_first=False), (TEXTS, CLASSES), output_dir=tmp_path)
    found = DummyClassifier(strategy="most_frequent").fit(TEXTS, CLASSES).predict(TEXTS)
    assert results()["eval_trivial_accuracy"] == accuracy_score(CLASSES, found) == 0.75
    assert results()["eval_trivial_f1"] == f1_score(CLASSES, found, average="macro", zero_division=0)
    assert results()["eval_trivial_matthews"] == 0


def test_the_trivial_answer_to_numbers_is_their_mean(tmp_path, results):
    numbers = [0.5, 1.0, 4.0, 2.5]
    trained(Classifier(), (TEXTS, numbers), output_dir=tmp_path)
    found = DummyRegressor().fit(TEXTS, numbers).predict(TEXTS)
    assert results()["eval_trivial_mse"] == pytest.approx(mean_squared_error(numbers, found))
    assert results()["eval_trivial_pearson"] == results()["eval_trivial_spearman"] == 0


@pytest.mark.parametrize(
    ("job", "columns", "expected"),
    [
        (Classifier, (TEXTS, [["a", "b"], ["a"], [], ["b", "a"]]), {"accuracy": 0.5, "f1_micro": 10 / 13}),  # a and b
        (Classifier, (TEXTS * 2, [["a", "b"], [], [], ["c"]] * 2), {"accuracy": 0.5, "f1_micro": 0}),  # no class
        (Tagger, ([text.split() for text in TEXTS], TAGS), {"f1": 0, "accuracy": 12 / 13}),
        (QuestionAnswerer, (["what?"] * 4, TEXTS, ANSWERS), OF_ANSWERS),
    ],
)
def test_the_trivial_answer_of_a_job_has_these_scores(tmp_path, results, job, columns, expected):
    trained(job(), columns, output_dir=tmp_path)
    for name, value in expected.items():
        assert results()[f"eval_trivial_{name}"] == pytest.approx(value), name


def test_a_model_that_learns_nothing_says_so_and_its_record_too(tmp_path, capsys):
    classifier = trained(Classifier(), (["the sea"] * 12, CLASSES * 3), output_dir=tmp_path)
    classifier.save(tmp_path)
    peers = ("frozen vectors and a linear model", "TF-IDF and a linear model", "the trivial answer, always sea")
    lost = "; nor than ".join(f"{peer}: accuracy, f1, matthews" for peer in peers)
    line = f"validation: not better than {lost}; all 12 predictions are equal"
    assert f"warning: {line}; train on more rows" in capsys.readouterr().out
    record = json.loads((tmp_path / "training.json").read_text())
    assert f"Warning: {line}." in record["remark"] and record["scores"][0]["trivial"]["accuracy"] == 0.75
    write_card(tmp_path)
    assert "nor than TF-IDF and a linear model: accuracy" in (tmp_path / "README.md").read_text()


def test_a_model_that_learns_something_has_no_such_warning(capsys):
    things = ["invoice", "screen", "parcel"]
    texts = [f"{word} {thing}" for thing in things for word in ("my", "the", "a new", "an old", "that")]
    held_out = [f"this {thing}" for thing in things]
    Classifier().fit(texts, [text.split()[-1] for text in texts], (held_out, things), **NOTHING)
    printed = capsys.readouterr().out
    table = r"3 rows +accuracy +f1\nthis model +1.0000 +1.0000\nfrozen.*\nTF.*\nthe .* always invoice +0.3333 +0.1667"
    assert re.search(table, printed) and "not better" not in printed


def test_a_metric_is_worse_unless_it_is_better_than_the_trivial_one_or_that_is_perfect():
    found = {"accuracy": 0.5, "mse": 2.0, "f1": 0.4, "impossible_accuracy": 0.9}
    trivial = {"accuracy": 0.5, "mse": 1.9, "f1": 0.3, "impossible_accuracy": 1.0}
    assert names_of_worse(found, trivial, is_trivial=True) == ["accuracy", "mse"]
    assert names_of_worse(found, trivial) == ["accuracy", "mse", "impossible_accuracy"]
    assert names_of_worse({"accuracy": 1.0, "mse": 0.0}, {"accuracy": 1.0, "mse": 0.0}) == []


@pytest.mark.parametrize("trivial", [{"accuracy": 1.0, "f1": 0.0}, {"mse": 0.0, "pearson": 0.0}])
def test_rows_in_which_the_trivial_answer_is_always_right_say_nothing_about_a_model(trivial):
    assert names_of_worse(dict.fromkeys(trivial, 0.5), trivial, is_trivial=True) == []


def test_a_text_that_just_fits_is_not_truncated(capsys):
    assert len(Classifier(max_seq_length=8).tokenizer("the sea is warm and old")["input_ids"]) == 8
    Classifier(max_seq_length=8).fit(["the sea is warm and old", "a house"], ["sea", "house"], **NOTHING)
    assert "truncated" not in capsys.readouterr().out


def test_truncated_texts_and_rows_of_the_training_are_counted(tmp_path, capsys):
    long, lost = "sea " * 50, "are truncated to 16 tokens, and at least 36 tokens are lost"
    held_out = ([TEXTS[0], "the fox", long], ["house", "sea", "sea"])
    classifier = Classifier(max_seq_length=16).fit([*TEXTS, long], [*CLASSES, "sea"], held_out, **NOTHING)
    printed = capsys.readouterr().out
    assert f"warning: training: 1 of 5 texts {lost}; choose max_seq_length" in printed
    assert f"1 of 3 texts {lost}" in printed
    assert "warning: validation: 2 of 3 rows equal a training row, so the scores are too good" in printed
    classifier.predict([long, "the fox"])
    assert capsys.readouterr().out == f"1 of 2 texts {lost}; choose max_seq_length\n"
    assert np.isfinite(classifier.outputs(["the sea"])).all() and not capsys.readouterr().out
    assert classifier.set_params(truncation="off").predict([long]) and not capsys.readouterr().out
    strict = Classifier(max_seq_length=16, truncation="error")
    for rows in (([*TEXTS, long], [*CLASSES, "sea"]), (TEXTS, CLASSES, held_out)):  # before the training
        with pytest.raises(ValueError, match=f"texts {lost}; split long texts, or choose warn as truncation"):
            strict.fit(*rows, **NOTHING)
    with pytest.raises(ValueError, match="truncation='cut' is none of warn, error, off; choose one of them"):
        classifier.set_params(truncation="cut").predict(["the sea"])
