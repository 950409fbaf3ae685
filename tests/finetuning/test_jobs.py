"""What all jobs share as Python calls: columns of any kind, refusals, fits that fail or are repeated, resume, the record."""

import json
import pickle
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from conftest import contents, largest_file
from transformers import AutoModelForSequenceClassification

from neobert_hf.checkpoints import lora_config, write_card
from neobert_hf.data import read_rows
from neobert_hf.finetuning import (
    Classifier,
    LabelledRows,
    LabelledTextArguments,
    QuestionAnswerer,
    Tagger,
    read_labelled_texts,
)
from neobert_hf.finetuning.predictions import write_predictions
from neobert_hf.finetuning.training import LAST_EPOCH
from neobert_hf.runs import FineTuningArguments

FAST = {"use_cpu": True, "learning_rate": 1e-2, "disable_tqdm": True, "max_steps": 4}
TEXTS, LABELS = ["the fox red", "a dog old", "red sea", "old sea"] * 2, ["red", "old"] * 4
WORDS, TAGS = [text.split() for text in TEXTS], [["O"] * (len(text.split()) - 1) + ["B-X"] for text in TEXTS]
ANSWERS = [{"text": [text.split()[0]], "answer_start": [0]} for text in TEXTS]
COLUMNS = {Classifier: (TEXTS, LABELS), Tagger: (WORDS, TAGS), QuestionAnswerer: (["it"] * 8, TEXTS, ANSWERS)}


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda job: job.__name__)
def trained(request, start):
    columns = COLUMNS[request.param]
    return request.param(start, 16).fit(*columns, **FAST), columns


@pytest.mark.compat
def test_a_training_in_bf16_says_so_and_predicts_in_float32_as_the_saved_model(start, tmp_path, capsys):
    job = Classifier(start, 16).fit(TEXTS, LABELS, training=FineTuningArguments(str(tmp_path), bf16=True, **FAST))
    job.save(tmp_path)
    assert "bf16=True: matrix products in bf16" in capsys.readouterr().out
    assert json.loads((tmp_path / "training.json").read_text())["settings"]["bf16"] is True
    opened = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype="float32").eval()
    with torch.no_grad():
        expected = opened(**job.tokenizer(TEXTS, padding=True, return_tensors="pt")).logits
    np.testing.assert_allclose(job.outputs(TEXTS), expected, atol=1e-6)  # one rounding to bf16 is 1e-3
    inner = vars(job.model_)
    assert inner["forward"] != inner["_original_forward"], "a training goes on in bf16 after an evaluation"
    read = pickle.loads(pickle.dumps(job))
    assert (read._training.use_cpu, read._training.bf16) == (False, False), "bf16 alone needs use_cpu on a CPU"
    reopened = Classifier(tmp_path).outputs(TEXTS, training=FineTuningArguments(use_cpu=True, bf16=True))
    np.testing.assert_allclose(reopened, expected, atol=1e-6)


def scores_of(job, *inputs):
    if isinstance(job, QuestionAnswerer):
        return [found["score"] for found in job.outputs(*inputs)]
    return job.predict_proba(*inputs)


def shuffled(column):
    return pandas.Series(column, index=range(len(column))[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("job", COLUMNS)
def test_a_job_that_is_not_verbose_tells_nothing_and_learns_the_same(start, tmp_path, capsys, caplog, job):
    columns = COLUMNS[job]
    longer = columns[-2] if job is Tagger else ["the fox red " * 9, *columns[-2][1:]]  # which is truncated
    long = [*columns[:-2], longer, columns[-1]]
    options = FAST | {"disable_tqdm": False, "logging_steps": 1}
    told = job(start, 16).fit(*long, columns, **options)
    assert capsys.readouterr().out
    scores = told.evaluate(*long)
    capsys.readouterr()
    silent = job(start, 16, verbose=False).fit(*long, columns, **options)
    assert silent.evaluate(*long) == scores
    silent.save(tmp_path / "saved")
    again = job(tmp_path / "saved", 16, verbose=False)
    assert again.predict(*long[:-1]) == silent.predict(*long[:-1])
    found = capsys.readouterr()
    assert not found.out and not re.search(r"\d+%|it/s", found.err)
    assert "8 of 8 rows equal a training row, so the scores are too good" in caplog.text  # a warning stays
    told.predict(*long[:-1])
    assert job is not Classifier or "1 of 8 texts are truncated" in capsys.readouterr().out


def test_a_full_disk_at_the_last_save_is_an_error_that_names_the_folder(trained, tmp_path):
    with pytest.raises(OSError, match=r"File too large: .*saved"), largest_file(9000):
        trained[0].save(tmp_path / "saved")


def test_no_rows_have_no_predictions_and_a_text_is_no_list_of_rows(trained):
    job, (*inputs, labels) = trained
    assert job.predict(*([] for _ in inputs)) == []
    assert len(scores_of(job, *([] for _ in inputs))) == 0
    with pytest.raises(ValueError, match=f"{job.column_names[0]} are a str; give a list with an item for each row"):
        job.predict("late", *inputs[1:])
    with pytest.raises(ValueError, match="every row needs one of each"):
        job.evaluate(*inputs, labels[:-1])
    with pytest.raises(ValueError, match="shorter"):
        job.evaluate(*inputs)


def test_a_fit_that_fails_leaves_the_model_its_names_and_its_scores(trained):
    job, (*inputs, labels) = trained
    before, names = job.predict(*inputs), job.classes_.tolist()
    with pytest.raises(ValueError, match=r"row 1: .*(missing|class|tags|'answers')"):
        job.fit(*inputs, [labels[0], None, *labels[2:]], **FAST)
    diverging = FAST | LAST_EPOCH | {"learning_rate": 1e38}
    with pytest.raises((ValueError, FloatingPointError), match=r"not finite|NaN|score of an answer"):
        job.fit(*inputs, labels, (*inputs, labels), **diverging)
    assert job.predict(*inputs) == before and job.classes_.tolist() == names


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_as_many_predictions_as_test_rows_and_metrics_over_labels_that_count(trained, tmp_path, capsys, suffix):
    """Of ten rows two have no text, one has no label, and one a label that does not count."""
    job, (*inputs, labels) = trained
    rows, places = [{"id": str(i)} for i in range(10)], [1, 2, 3, 5, 6, 7, 8, 9]
    more = {"test_places": places, "test_faults": [("line 3", "wrong")]}
    data = LabelledRows(None, None, (*inputs, [None, None, *labels[2:]]), rows, {}, None, **more)
    training = SimpleNamespace(output_dir=tmp_path, should_save=True, per_device_eval_batch_size=8)
    job.predict_rows(data, training, tmp_path / f"a{suffix}")
    answered = [rows[place] for place in places]
    write_predictions(tmp_path / f"b{suffix}", job.prediction_rows(job.outputs(*inputs), answered))
    found, expected = ([row.values for row in read_rows(tmp_path / f"{name}{suffix}")] for name in "ab")
    assert [found[place] for place in places] == expected and len(found) == 10
    for place in (0, 4):
        assert found[place].keys() == expected[0].keys() and found[place].pop("id") == str(place)
        assert not any(found[place].values())
    scores = json.loads((tmp_path / "test_results.json").read_text())
    for name, value in job.evaluate(*(column[2:] for column in inputs), labels[2:]).items():
        assert scores[f"test_{name}"] == pytest.approx(value, abs=1e-6)
    line = "test: 10 rows, 8 with a text, 6 with a label that counts in the metrics; line 3: wrong\n"
    assert line in capsys.readouterr().out


def test_the_first_thing_that_a_saved_model_does_can_be_to_predict_a_file(trained, tmp_path):
    job, (*inputs, _) = trained
    job.save(tmp_path / "saved")
    rows = [{"id": str(i)} for i in range(8)]
    data = LabelledRows(None, None, (*inputs, None), rows, {}, None, test_places=list(range(8)))
    training = FineTuningArguments(str(tmp_path / "new"), **FAST)
    type(job)(tmp_path / "saved").predict_rows(data, training)
    assert len(list((tmp_path / "new").glob("predictions.*"))) == 1


ONE, PAIR = ["a", "b"], [("a", "b")] * 2
NEAR = "cannot be told apart in float32"
MULTI_HOT = np.array([[0, 1], [1, 0]])
MAY = ["When?"], ["It ends in May."], [{"text": ["May"], "answer_start": [3]}]
REFUSED = [
    (Classifier, lambda job: job.fit(ONE * 2, ["x", "y"]), "4 texts and 2 labels; every row needs one of each"),
    (Classifier, lambda job: job.fit("ab", ["x", "y"]), "texts are a str; give a list with an item for each row"),
    (Classifier, lambda job: job.fit(pandas.DataFrame({"a": ONE}), ["x"]), "texts are a DataFrame; give a list"),
    (Classifier, lambda job: job.fit([], []), "0 texts and 0 labels; give at least one row"),
    (Classifier, lambda job: job.fit(["a", np.nan], ["x", "y"]), "row 1: 'text' is nan, a float; every text must"),
    (Classifier, lambda job: job.fit(["a", " "], ["x", "y"]), "row 1: 'text' is empty"),
    (Classifier, lambda job: job.fit([("a", ""), ("", None)], ["x", "y"]), "row 1: 'text 1' and 'text 2' are empty"),
    (Classifier, lambda job: job.fit([("a", "b", "c")] * 2, ["x", "y"]), "row 0: too many values to unpack"),
    (Classifier, lambda job: job.fit(["ab", *PAIR], ["x", "y", "y"]), "some rows are one text, and others a pair"),
    (Classifier, lambda job: job.fit(ONE, MULTI_HOT), "the lists of classes have 0 and 1 only; list the names"),
    (Classifier, lambda job: job.fit(ONE, [0, 1], classes=[0, 1, 0]), "has a name twice; give each class once"),
    (Classifier, lambda job: job.fit(ONE, ["x", "y"], ([], [])), "0 texts and 0 labels; give at least one row"),
    (Classifier, lambda job: job.fit(ONE, ["x", "y"], (ONE,)), "shorter"),
    (Classifier, lambda job: job.fit(ONE, [0, 1], training=FineTuningArguments("x"), seed=7), "give seed in the train"),
    (Classifier, lambda job: job.fit(ONE, [0, 1], epochs=3), "unexpected keyword argument 'epochs'"),
    (Tagger, lambda job: job.fit(WORDS, TAGS, sample_weight=[1]), "unexpected keyword argument 'sample_weight'"),
    (Classifier, lambda job: job.set_params(random_state=1).fit(ONE, [0, 1], seed=7), "multiple values for .* 'seed'"),
    (
        Classifier,
        lambda job: job.set_params(learning_rate=1).fit(ONE, [0, 1], training=FineTuningArguments("x")),
        "give learning_rate in the training arguments, not beside",
    ),
    *(
        (Classifier, lambda job, given=given: job.fit(ONE, [0, 1], sample_weight=given), "give each of the 2 rows a")
        for given in ([1], [0, 0], [1, -1], [1, np.nan], [[1], [1]])
    ),
    (Classifier, lambda job: job.fit(ONE, [1.5, 2], sample_weight=[1, 2]), "not for regression; repeat rows instead"),
    (Classifier, lambda job: job.fit({"a", "b"}, [0, 1]), "texts are a set; give a list with an item for each row"),
    (Classifier, lambda job: job.fit(ONE, [0, 1], (ONE, frozenset((0, 1)))), "labels are a frozenset; give a list"),
    (Classifier, lambda job: job.fit(ONE, None), "labels are a NoneType; give a list with an item for each row"),
    (Classifier, lambda job: job.model_, "is not a trained classifier; give the folder of one .*, or rows to train on"),
    (Classifier, lambda job: job.merge(), "is not a trained classifier"),
    (Classifier, lambda job: job.save("x"), "is not a trained classifier"),
    (Classifier, lambda job: job.fit(TEXTS, LABELS, **FAST).merge(), "has no adapter to merge; call fit with adapter="),
    *(
        (Classifier, lambda job, labels=labels: job.fit(["x", "y", "z"], labels), message)
        for labels, message in [
            (["a"] * 3, "all training rows have the label 'a'; a classifier needs at least two classes"),
            (["a", "b", None], "the label is missing"),
            (["a", ["b"], "a"], "a label is a list if rows have several classes"),
            ([1.5, 1.5, 1.5 + 1e-12], f"from 1.5 to 1.500000000001, {NEAR}.*; subtract a constant"),
            ([1732700000000.5 + i for i in range(3)], NEAR),
            ([1e39, 2.5, 3e300], NEAR),
            ([1.5, 1.5, 1.5], "all training rows have the label 1.5, so nothing can be learned"),
        ]
    ),
    (Classifier, lambda job: job.fit(ONE, ["a", "b"], (["x"], ["c"])), "label 0: unknown class 'c'; the classes are a"),
    (Classifier, lambda job: job.set_params(max_seq_length=2).fit(ONE, ["a", "b"]), "max_seq_length=2 leaves no token"),
    (Tagger, lambda job: job.fit(["late"], [["O"]]), "row 0: the words are 'late'; give a list of words"),
    (Tagger, lambda job: job.fit([["late"]], [None]), "row 0: the tags are None; give a list of tags"),
    (QuestionAnswerer, lambda job: job.fit(["a"], [""], [{}]), "row 0: 'context' is empty"),
    (QuestionAnswerer, lambda job: job.fit(*MAY), "'May' is not at character 3, its answer_start; it is at 11"),
]


@pytest.mark.parametrize(("job", "call", "message"), REFUSED)
def test_what_a_job_cannot_use_is_refused(start, job, call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(job(start))


@pytest.mark.slow
def test_a_fit_takes_the_rows_of_a_file_also_with_labels_of_another_kind(start, tmp_path):
    rows = [f"{text},{number % 2}\n" for number, text in enumerate(TEXTS)]
    (tmp_path / "a.csv").write_text("".join(["text,label\n", *rows]))
    (tmp_path / "b.csv").write_text("text,label\nred,0\nold,\nsea,7\n")
    files = [str(tmp_path / f"{name}.csv") for name in "aab"]
    found = read_labelled_texts(LabelledTextArguments(*files), 0)
    names = {"classes": found.classes, "problem_type": found.problem_type}
    job = Classifier(start, 16).fit(*found.train, found.validation, **names, **FAST)
    assert job.evaluate(*found.validation)
    with pytest.raises(ValueError, match="row 1: the label is missing"):
        job.evaluate(*found.test)
    assert Classifier(start, 16).fit(*found.train, problem_type="regression", **FAST).classes_.tolist() == ["label"]


def test_a_pooling_that_the_model_lacks_is_refused(bert):
    with pytest.raises(TypeError, match="unexpected keyword argument 'classifier_pooling'"):
        Classifier(bert, classifier_pooling="mean").fit(ONE, ["x", "y"])


@pytest.mark.slow
def test_labels_of_an_evaluation_have_the_forms_of_those_of_a_fit(start):
    marked = [["S-X" if tag == "B-X" else tag for tag in tags] for tags in TAGS]
    tagger = Tagger(start, 16).fit(np.array(WORDS, object), [np.array(tags) for tags in marked], **FAST)
    assert tagger.evaluate(WORDS, marked) == tagger.evaluate([tuple(words) for words in WORDS], TAGS)
    questions, contexts, answers = COLUMNS[QuestionAnswerer]
    other = [[{"text": f"{answer['text'][0]} ", "answer_start": np.int64(0)}] for answer in answers]
    answerer = QuestionAnswerer(start, 16).fit(questions, contexts, other, **FAST)
    assert answerer.evaluate(questions, contexts, other) == answerer.evaluate(questions, contexts, answers)


@pytest.mark.slow
@pytest.mark.parametrize("job", COLUMNS)
def test_one_object_of_arguments_serves_several_fits_also_without_validation(start, tmp_path, job):
    training = FineTuningArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, max_steps=2)
    before = training.to_dict()
    columns, twice = COLUMNS[job], job(start, 16)
    twice.fit(*columns, training=training)
    assert training.to_dict() == before and training.learning_rate is None
    found = scores_of(twice, *columns[:-1])
    shutil.rmtree(tmp_path)
    again = scores_of(twice.fit(*columns, training=training), *columns[:-1])
    assert all(np.array_equal(a, b) for a, b in zip(again, found)), "the second fit begins from the start"


@pytest.mark.slow
def test_the_record_has_the_scores_of_the_last_fit_the_configuration_and_no_text(start, tmp_path):
    pairs = [(text, "sea") for text in TEXTS]
    classifier = Classifier(start, 16).fit(pairs, LABELS, (pairs, LABELS), **FAST)
    names = dict.fromkeys(("train", "validation"), "some/data")
    classifier.save(tmp_path, LabelledRows(None, None, None, [], names, "some/data", "rte"))
    text = (tmp_path / "training.json").read_text()
    record = json.loads(text)
    assert record["is_pair"] is True and "the fox" not in text
    (score,) = record["scores"]
    assert (score["dataset_id"], score["config"]) == ("some/data", "rte")
    assert score["metrics"] == Classifier(tmp_path).evaluate(pairs, LABELS)
    classifier.fit(TEXTS, LABELS, **FAST).save(tmp_path, overwrite=True)
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["scores"] == [] and record["is_pair"] is False and record["settings"]["learning_rate"] == 1e-2
    assert record["source"] is None and record["rows"] == {"rows given in Python": 8}


@pytest.mark.slow
def test_a_model_is_saved_over_another_one_only_if_this_is_asked_for_and_then_nothing_of_that_stays(start, tmp_path):
    """Its card, scores and pictures would be taken for those of the new model."""
    place, fresh, run, columns = tmp_path / "place", tmp_path / "fresh", tmp_path / "run", (TEXTS, LABELS)
    Tagger(start, 16).fit(WORDS, TAGS, **FAST).save(place)
    write_card(place)
    before = contents(place)
    plain = Classifier(start, 16).fit(*columns, columns, output_dir=str(run), **FAST)
    with pytest.raises(FileExistsError, match=r"place holds README\.md; .*or give overwrite=True"):
        plain.save(place)
    (place / "survey_results.json").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds survey_results\.json; .* only what its training\.json lists"):
        plain.save(place, overwrite=True)
    (place / "survey_results.json").unlink()
    with largest_file(9999), pytest.raises(OSError, match="File too large"):
        plain.save(place, overwrite=True)
    assert contents(place) == before
    plain.save(place, overwrite=True)
    plain.save(fresh)
    assert contents(place) == contents(fresh)
    plain.save(run)
    plain.save(run)  # the folder of its own training
    with pytest.raises(FileExistsError, match="run holds"):  # of another training
        Classifier(place).save(run, overwrite=True)
    opened = Classifier(place)
    with pytest.raises(FileExistsError, match="place is also an input"):
        opened.save(place, overwrite=True)  # its record would be lost
    for _ in range(2):
        opened.save(tmp_path / "opened", overwrite=True)
    tuned = Classifier(place, 16).fit(TEXTS, LABELS, **FAST)
    tuned.save(place, overwrite=True)
    assert Classifier(place).predict(TEXTS) == tuned.predict(TEXTS)
    with pytest.raises(FileExistsError, match=r"fresh holds .*; choose a new or empty folder"):
        Classifier(start, 16).fit(TEXTS, LABELS, output_dir=str(fresh), **FAST)


@pytest.mark.slow
def test_the_identity_of_a_run_has_all_that_changes_its_model(start, tmp_path):
    def identity(name, job, columns=(TEXTS, LABELS), **options):
        job.fit(*columns, **{**FAST, "output_dir": str(tmp_path / name), "per_device_train_batch_size": 4, **options})
        return json.loads((tmp_path / name / "run.json").read_text())

    first = identity("first", Classifier(start, 16), validation=(TEXTS, LABELS))
    assert {"weight_decay", "lr_scheduler_type", "bf16", "gradient_accumulation_steps", "seed"} <= {*first}
    adapters = [lora_config("SEQ_CLS", r=r) for r in (4, 8)]
    others = {
        "validation": identity("a", Classifier(start, 16), validation=(TEXTS[:6], LABELS[:6])),
        "classifier_pooling": identity("b", Classifier(start, 16, "mean"), validation=(TEXTS, LABELS)),
        "adapter": identity("c", Classifier(start, 16, adapter=adapters[0]), validation=(TEXTS, LABELS)),
        "learning_rate": identity("d", Classifier(start, 16), validation=(TEXTS, LABELS), learning_rate=2e-3),
        "weights": identity("w", Classifier(start, 16), validation=(TEXTS, LABELS), sample_weight=[1, 2] * 4),
    }
    for name, other in others.items():
        assert {key for key in other if other[key] != first.get(key)} == {name}
    wider = identity("e", Classifier(start, 16, adapter=adapters[1]))
    assert others["adapter"]["adapter"]["r"] == 4 and wider["adapter"]["r"] == 8
    strides = [QuestionAnswerer(start, 16, stride=stride) for stride in (2, 4)]
    found = [identity(f"q{job.stride}", job, COLUMNS[QuestionAnswerer]) for job in strides]
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"stride"}


@pytest.mark.slow
def test_an_adapter_that_was_opened_is_saved_and_merged_and_is_no_start(start, tmp_path):
    adapter = lora_config("SEQ_CLS", r=4)
    classifier = Classifier(start, 16, adapter=adapter, head_first=False).fit(TEXTS, LABELS, **FAST | {"max_steps": 12})
    classifier.save(tmp_path / "adapter")
    assert adapter.base_model_name_or_path is None, "the configuration of the caller stays as it is"
    assert not (tmp_path / "adapter/model.safetensors").exists()
    expected = classifier.predict_proba(TEXTS)
    classifier.merge()
    np.testing.assert_allclose(classifier.predict_proba(TEXTS), expected, atol=1e-5)
    opened = Classifier(tmp_path / "adapter")
    assert Classifier(start, 16, adapter=adapter).fit(TEXTS, [True, False] * 4, **FAST).save(tmp_path / "typed") is None
    typed = Classifier(tmp_path / "typed")
    typed.merge()
    typed.save(tmp_path / "whole")
    for name in ("typed", "whole"):
        assert Classifier(tmp_path / name).classes_.tolist() == [0, 1]
    opened.save(tmp_path / "copy")
    np.testing.assert_array_equal(Classifier(tmp_path / "copy").predict_proba(TEXTS), expected)
    opened.merge()
    opened.save(tmp_path / "merged")
    np.testing.assert_allclose(Classifier(tmp_path / "merged").predict_proba(TEXTS), expected, atol=1e-5)
    for more in ({}, {"adapter": adapter}):
        with pytest.raises(ValueError, match="is an adapter, whose weights are not trained again; merge it first"):
            Classifier(tmp_path / "adapter", **more).fit(TEXTS, LABELS, **FAST)
