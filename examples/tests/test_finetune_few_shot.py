"""Few examples: the head is scikit-learn's, the folder opens alone, and the script says what is wrong."""

import json
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("sentence_transformers", reason="needs sentence-transformers (pip install -e .[embed])")
pytest.importorskip("sklearn", reason="needs scikit-learn (pip install -e .[train])")

import finetune_few_shot
import pandas
import torch
from conftest import json_lines, run_main
from finetune_few_shot import FewShotClassifier, add_head, draw_examples, steps_for
from scipy.special import softmax
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from neobert_hf import NeoBERTModel, sentence_transformer
from neobert_hf.export.graphs import load_graph
from neobert_hf.hub import write_card

TEXTS = [*("the fox red", "a dog red", "red sea"), *("the fox old", "a dog old", "old sea")]
TEXTS += ["the house", "a house", "warm house"]
LABELS = [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.fixture
def model_folder(start, tmp_path):
    return shutil.copytree(start, tmp_path / "model")


@pytest.mark.parametrize("num_classes", [2, 3])
def test_the_head_gives_the_probabilities_of_scikit_learn_also_after_loading(model_folder, tmp_path, num_classes):
    count, names = 3 * num_classes, ["red", "old", "house"][:num_classes]
    model = sentence_transformer(str(model_folder))
    vectors = model.encode(TEXTS, normalize_embeddings=True)
    regression = make_pipeline(StandardScaler(), LogisticRegression(C=0.5, max_iter=1000))
    regression.fit(vectors[:count], LABELS[:count])
    add_head(model, TEXTS[:count], LABELS[:count], names, strength=0.5)
    model.save_pretrained(str(tmp_path / "saved"))
    expected = regression.predict_proba(vectors)
    for with_head in (model, SentenceTransformer(str(tmp_path / "saved"), device="cpu")):
        # the layer is float32
        np.testing.assert_allclose(softmax(with_head.encode(TEXTS), -1), expected, rtol=1e-5, atol=1e-6)
    assert FewShotClassifier(tmp_path / "saved").classes_.tolist() == sorted(names)
    assert not [file for file in (tmp_path / "saved").rglob("*") if file.suffix in (".pkl", ".bin", ".joblib", ".pt")]


@pytest.mark.slow
def test_a_trained_mini_model_embeds_the_empty_text_and_opens_with_the_same_logits(tmp_path):
    words = ["fox", "dog", "sea", "house"]
    texts = [f"open the {word} file" for word in words] + [f"wait for {word} seconds" for word in words]
    options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    classifier = FewShotClassifier().fit(texts, ["file"] * 4 + ["wait"] * 4, **options)
    body = SentenceTransformer(modules=list(classifier.model_)[:-2])
    assert 15 < np.linalg.norm(body.encode("")) < 25  # 19.4 before the training
    classifier.save(tmp_path)
    logits = classifier.model_.encode(["", *texts])
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path)).encode(["", *texts]), logits)


@pytest.mark.parametrize(("counts", "steps"), [([8, 8], 20), ([8] * 77, 100), ([16] * 4, 30), ([1, 1], 20)])
def test_the_number_of_steps_follows_that_of_the_pairs(counts, steps):
    labels = [i for i, count in enumerate(counts) for _ in range(count)]
    assert steps_for(labels, 16) == steps


NAMES = {"id2label": {0: "red", 1: "old", 2: "house"}, "label2id": {"red": 0, "old": 1, "house": 2}}
EMBEDDING_MODELS = {  # settings of the encoder, and the modules after it that end with a Dense
    "as many as by default": ({}, [Dense(32, 2)]),
    "default names": ({"num_labels": 3}, [Normalize(), Dense(32, 3, activation_function=torch.nn.Identity())]),
    "names of an encoder": (NAMES, [Dense(32, 3, activation_function=torch.nn.Identity())]),
    "names, and a Normalize": (NAMES, [Normalize(), Dense(32, 3)]),
}


@pytest.mark.parametrize("name", EMBEDDING_MODELS)
def test_an_embedding_model_with_as_many_outputs_as_classes_has_no_classes(model_folder, tmp_path, name):
    settings, modules = EMBEDDING_MODELS[name]
    NeoBERTModel.from_pretrained(model_folder, **settings).save_pretrained(model_folder)
    model = sentence_transformer(str(model_folder))
    model.extend(modules)
    model.save_pretrained(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="saved has no classes; give the folder of a trained model"):
        FewShotClassifier(tmp_path / "saved").predict(["fox"])
    assert load_graph(tmp_path / "saved").task == "sentence-similarity"
    write_card(tmp_path / "saved")
    assert "pipeline_tag: sentence-similarity" in (tmp_path / "saved/README.md").read_text()


@pytest.mark.parametrize("kind", ["new", "of an older version", "saved again by sentence-transformers", "LABEL_0"])
def test_the_folder_of_a_classifier_keeps_its_classes(model_folder, tmp_path, kind):
    """Also of an embedding model that cuts its vectors: the logits are not cut."""
    names = ["LABEL_0", "LABEL_1"] if kind == "LABEL_0" else ["red", "old", "house"]
    model = sentence_transformer(str(model_folder))
    model.truncate_dim = 2
    texts, labels = TEXTS[: 3 * len(names)], LABELS[: 3 * len(names)]
    add_head(model, texts, labels, names)
    add_head(model, texts, labels, names)  # instead of the first one
    model.save_pretrained(str(tmp_path / "saved"))
    if kind == "of an older version":
        file = tmp_path / "saved/modules.json"
        *others, last = json.loads(file.read_text())
        file.write_text(json.dumps([*others, last | {"name": str(last["idx"])}]))
    elif kind.startswith("saved again"):
        SentenceTransformer(str(tmp_path / "saved"), device="cpu").save_pretrained(str(tmp_path / "saved"))
    assert FewShotClassifier(tmp_path / "saved").predict(texts) == [names[i] for i in labels]
    assert load_graph(tmp_path / "saved").task == "text-classification"
    write_card(tmp_path / "saved")
    assert "pipeline_tag: text-classification" in (tmp_path / "saved/README.md").read_text()


def test_examples_are_drawn_of_each_class_and_differ_by_the_seed():
    labels = [int(i % 10 == 0) for i in range(100)]
    drawn = [draw_examples(labels, 12, seed) for seed in (0, 0, 1)]
    for chosen in drawn:
        assert sum(labels[i] for i in chosen) == 10 and len(chosen) == 22  # all that the rare class has
    assert drawn[0] == drawn[1] != drawn[2]
    assert draw_examples(labels, None, 0) == list(range(100))


def command(folder, *more):
    return ["--use_cpu", "true", "--report_to", "none", "--output_dir", folder / "out", *more]


def test_the_script_learns_from_eight_examples_and_predicts_again_without_training(model_folder, tmp_path):
    words = ["fox", "dog", "sea", "house", "quick", "brown", "lazy", "warm"]
    rows = [{"text": f"the {word} {kind}", "label": kind} for word in words for kind in ("red", "old")]
    train = json_lines(tmp_path / "train.jsonl", rows)
    test = json_lines(
        tmp_path / "test.jsonl",
        [{"text": f"a {word} {kind}", "label": kind} for word in words for kind in ("old", "red")],
    )
    start = ("--model_name_or_path", model_folder, "--learning_rate", "3e-3", "--train_file", train)
    printed = run_main(finetune_few_shot, *command(tmp_path, *start, "--test_file", test))
    assert "16 examples of 2 classes: old, red" in printed and re.search(r"this model +1\.0000", printed)
    assert json.loads((tmp_path / "out/test_results.json").read_text())["test_accuracy"] == 1
    assert (tmp_path / "out/confusion_matrix_test.png").is_file()
    found = pandas.read_csv(tmp_path / "out/predictions.csv")
    assert list(found["prediction"]) == ["old", "red"] * 8
    np.testing.assert_allclose(found["probability_old"] + found["probability_red"], 1, atol=1e-5)
    again = ("--model_name_or_path", tmp_path / "out", "--test_file", test, "--output_dir", tmp_path / "again")
    run_main(finetune_few_shot, *command(tmp_path, *again))
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "again/predictions.csv"), found)


ROWS = TEXTS[:6], ["red"] * 3 + ["old"] * 3
FEW = "fewer than two classes have two examples to compare"
REFUSED = [
    (lambda job: job.fit(*ROWS, warmup=9), r"did you mean warmup_steps\?"),
    (lambda job: job.fit(*ROWS, classes=["old", "red", "new"]), "'new' has no example"),
    (lambda job: job.fit(*ROWS, (["a"], ["new"])), "unknown class 'new'"),
    (lambda job: job.save("x"), "has no classes; give the folder of a trained model, or rows"),
    (lambda job: job.fit([*TEXTS[1:6], ("a", "b")], ROWS[1]), "row 5: a pair of texts has no vector"),
    (lambda job: job.fit([("a", "b")] * 6, ROWS[1]), "a pair of texts has no vector of its own"),
    (lambda job: job.fit(*ROWS, examples_per_class=1), FEW),
    (lambda job: job.fit(*ROWS, examples_per_class=-1), FEW),
    (lambda job: job.predict(["fox"]), "model has no classes; give the folder of a trained model"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_few_examples_cannot_teach_is_refused(start, call, message):
    with pytest.raises(ValueError, match=message):
        call(FewShotClassifier(start))


@pytest.mark.slow
def test_a_trained_model_is_a_start_for_other_classes(model_folder, tmp_path):
    """Three classes become two."""
    options = {"max_steps": 1, "learning_rate": 0.0, "use_cpu": True, "disable_tqdm": True}
    names = ["red", "old", "house"]
    classifier = FewShotClassifier(model_folder).fit(TEXTS, [names[i] for i in LABELS], classes=names, **options)
    classifier.save(tmp_path / "saved")
    again = FewShotClassifier(tmp_path / "saved").fit(TEXTS[:6], [names[i] for i in LABELS[:6]], **options)
    assert again.predict_proba(TEXTS).shape == (9, 2) and again.classes_.tolist() == ["old", "red"]
    assert again.predict(TEXTS[:6]) == [names[i] for i in LABELS[:6]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": "fox", "label": "a"}, {"text": "dog", "label": "b"}, {"text": "sea", "label": "b"}],
            "fewer than two classes have two examples",
        ),
        ([{"text": "fox", "label": "a"}] * 4, "a classifier needs at least two classes"),
        ([{"text": "fox", "label": ["a", "b"]}] * 4, "a label is a list if rows have several classes"),
    ],
)
def test_examples_that_cannot_be_learned_are_one_line_and_nothing_is_written(model_folder, tmp_path, rows, message):
    start = ("--model_name_or_path", model_folder, "--train_file", json_lines(tmp_path / "train.jsonl", rows))
    with pytest.raises(SystemExit, match=message) as error:
        run_main(finetune_few_shot, *command(tmp_path, *start))
    assert len(str(error.value).splitlines()) == 1 and not (tmp_path / "out").exists()
