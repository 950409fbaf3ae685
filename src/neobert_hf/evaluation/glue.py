"""GLUE as in the paper (section 5.1, appendix C): tasks, original files, metrics, settings of Table 6, scores of Table 3."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Value, load_dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from ..data.rows import tab_separated
from ..data.texts import check_texts

HUB_ID = "nyu-mll/glue"
ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class GlueTask:
    """A task, its original files and its metrics.

    Args:
        name: Name of the task, and of its configuration on the Hub.
        folder: Folder of the original archive.
        texts: Columns of the texts on the Hub.
        classes: Names of the classes in the order of their ids; None for a score from 0 to 5.
        metrics: Names of the metrics; the score of the task is their mean.
        file_texts: Columns of the texts in the original files, if they differ.
        file_label: Column of the label there.
        no_header: Names of the columns of a file that has no header.
        validation: Names of the validation splits on the Hub.
        is_damaged: The original files have truncated lines, which every loader leaves out, and rows with an empty text, which
            every loader keeps.
        may_have_header: The files with `no_header` also exist with a header.
        has_names: The files have names of classes, and no ids.
    """

    name: str
    folder: str
    texts: tuple[str, ...]
    classes: tuple[str, ...] | None
    metrics: tuple[str, ...] = ("accuracy",)
    file_texts: tuple[str, ...] | None = None
    file_label: str = "label"
    no_header: tuple[str, ...] | None = None
    validation: tuple[str, ...] = ("validation",)
    is_damaged: bool = False
    may_have_header: bool = False
    has_names: bool = False

    @property
    def num_labels(self) -> int:
        """Width of the classifier."""
        return len(self.classes or ("score",))


TASKS = {
    task.name: task
    for task in (
        GlueTask(
            "cola",
            "CoLA",
            ("sentence",),
            ("unacceptable", "acceptable"),
            ("matthews",),
            no_header=("source", "label", "mark", "sentence"),
        ),
        GlueTask(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            file_texts=("sentence1", "sentence2"),
            file_label="gold_label",
            validation=("validation_matched", "validation_mismatched"),
            has_names=True,
        ),
        GlueTask(
            "mrpc",
            "MRPC",
            ("sentence1", "sentence2"),
            ("not_equivalent", "equivalent"),
            ("accuracy", "f1"),
            file_texts=("#1 String", "#2 String"),
            file_label="Quality",
        ),
        GlueTask("qnli", "QNLI", ("question", "sentence"), ENTAILMENT, has_names=True),
        GlueTask(
            "qqp",
            "QQP",
            ("question1", "question2"),
            ("not_duplicate", "duplicate"),
            ("accuracy", "f1"),
            file_label="is_duplicate",
            is_damaged=True,
        ),
        GlueTask("rte", "RTE", ("sentence1", "sentence2"), ENTAILMENT, has_names=True),
        GlueTask("sst2", "SST-2", ("sentence",), ("negative", "positive")),
        GlueTask(
            "stsb",
            "STS-B",
            ("sentence1", "sentence2"),
            None,
            ("pearson", "spearman"),
            file_label="score",
            no_header=("genre", "file", "year", "index", "score", "sentence1", "sentence2"),
            may_have_header=True,
        ),
        GlueTask("wnli", "WNLI", ("sentence1", "sentence2"), ENTAILMENT[::-1]),
    )
}
AVERAGED = tuple(name for name in TASKS if name != "wnli")  # appendix C: WNLI is excluded
FROM_MNLI = ("mrpc", "qnli", "rte", "stsb")  # appendix C: start from the best MNLI checkpoint

# Appendix C, Table 6: batch size, learning rate, weight decay.
PRESETS = {
    "NeoBERT-1024": {
        "cola": (4, 6e-6, 1e-5),
        "mnli": (16, 6e-6, 1e-2),
        "mrpc": (8, 2e-5, 1e-5),
        "qnli": (8, 5e-6, 1e-5),
        "qqp": (32, 1e-5, 1e-2),
        "rte": (8, 6e-6, 1e-5),
        "sst2": (16, 1e-5, 1e-5),
        "stsb": (8, 1e-5, 1e-2),
    },
    "NeoBERT-4096": {
        "cola": (8, 8e-6, 1e-5),
        "mnli": (16, 5e-6, 1e-5),
        "mrpc": (2, 1e-5, 1e-5),
        "qnli": (8, 5e-6, 1e-5),
        "qqp": (32, 8e-6, 1e-5),
        "rte": (32, 5e-6, 1e-5),
        "sst2": (32, 8e-6, 1e-2),
        "stsb": (32, 2e-5, 1e-5),
    },
}
GRID = {
    "per_device_train_batch_size": (2, 4, 8, 16, 32),
    "learning_rate": (5e-6, 6e-6, 8e-6, 1e-5, 2e-5, 3e-5),
    "weight_decay": (1e-2, 1e-5),
}

# Table 3, scores on the development sets.
TABLE_3_TASKS = ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb")
TABLE_3 = {
    "BERT base": (84.0, 90.5, 71.2, 66.4, 93.5, 88.9, 52.1, 85.8),
    "RoBERTa base": (87.6, 92.8, 91.9, 78.7, 94.8, 90.2, 63.6, 91.2),
    "ModernBERT base": (89.1, 93.9, 92.1, 87.4, 96.0, 92.2, 65.1, 91.8),
    "NeoBERT-1024": (88.9, 93.9, 90.7, 91.0, 95.8, 93.4, 64.8, 92.1),
    "NeoBERT-4096": (89.0, 93.7, 90.7, 91.3, 95.6, 93.4, 66.2, 91.8),
}


def load_task(task: GlueTask, data_dir: str | Path | None = None) -> dict[str, Dataset]:
    """Load the training and validation rows of a task, from its original files or from the Hub.

    Args:
        task: One of `TASKS`.
        data_dir: Folder with the files of the task (train.tsv, dev.tsv; STS-B's also as .csv), or a folder that holds the
            task's folder; None loads `nyu-mll/glue`.

    Returns:
        `train` and each split of `task.validation`, with the columns of `task.texts` and `label`.

    Raises:
        ValueError: A line is truncated, a label is not one of the task's, or a text is empty; the message names the line.
        OSError: A file is missing or cannot be read.
    """
    if data_dir is None:
        data = load_dataset(HUB_ID, task.name)
        return {split: data[split].remove_columns("idx") for split in ("train", *task.validation)}
    folder = _folder(task, Path(data_dir))
    stems = ["train", *(split.replace("validation", "dev") for split in task.validation)]
    label = Value("float32") if task.classes is None else ClassLabel(names=list(task.classes))
    features = Features({**dict.fromkeys(task.texts, Value("string")), "label": label})
    data = {}
    for split, stem in zip(("train", *task.validation), stems):
        file = _file(folder, stem)
        rows = list(_rows(task, file))
        if not rows:
            raise ValueError(f"{file}: no rows; check that the download is complete")
        data[split] = Dataset.from_list(rows, features=features)
    return data


def _folder(task: GlueTask, data_dir: Path) -> Path:
    inner = [each for each in sorted(data_dir.iterdir()) if each.is_dir() and _task_of(each) == task]
    other = _task_of(data_dir)
    if not inner and other not in (None, task):
        raise FileNotFoundError(
            f"{data_dir} is the folder of {other.folder}, and {task.name} needs {task.folder}; name the folder above it, or "
            f"choose the task {other.name}"
        )
    return inner[0] if inner else data_dir


def _task_of(folder: Path) -> GlueTask | None:
    """The task whose original folder has this name."""
    name = folder.resolve().name.lower()
    return next((task for task in TASKS.values() if name in (task.folder.lower(), task.name)), None)


def _file(folder: Path, stem: str) -> Path:
    names = [f"{prefix}{stem}.{suffix}" for prefix in ("", "sts-") for suffix in ("tsv", "csv")]
    for name in names:
        if Path(folder, name).is_file():
            return Path(folder, name)
    raise FileNotFoundError(
        f"{folder} has none of {', '.join(names)}; name the folder with the task's original files, or leave --data_dir out"
    )


def _rows(task: GlueTask, file: Path) -> Iterator[dict]:
    """The rows of an original file: separated by tabs, without quotes, whatever its suffix."""
    columns = task.file_texts or task.texts
    with file.open(encoding="utf-8-sig", errors="replace") as stream:
        first = stream.readline().rstrip("\r\n").split("\t")
    has_header = {*columns, task.file_label} <= set(first) and (task.no_header is None or task.may_have_header)
    if not has_header and task.no_header is None:
        raise ValueError(
            f"{file}, line 1: the columns {', '.join(first)[:200]} do not include {', '.join((*columns, task.file_label))}, "
            f"which the original files of {task.folder} have; check that this is a file of this task"
        )
    truncated = []
    names = None if has_header else task.no_header
    for place, row in tab_separated(file, names, truncated if task.is_damaged else None):
        try:
            texts = [row[column] for column in columns]
            check_texts(texts)
            empty = [column for column, text in zip(columns, texts) if not text.strip()]
            if empty and not task.is_damaged:
                raise ValueError(f"{empty[0]!r} is empty; correct or remove this line")
            yield {**dict(zip(task.texts, texts)), "label": _label(task, row[task.file_label])}
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    if truncated:
        print(f"{file}: left out {len(truncated)} truncated lines: {', '.join(map(str, truncated[:20]))}", flush=True)


def _label(task: GlueTask, text: str) -> float | int:
    if task.classes is None:
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not 0 <= score <= 5:
            raise ValueError(f"the score {text!r} is not a number from 0 to 5; correct or remove this line")
        return score
    if text in task.classes:
        return task.classes.index(text)
    if not task.has_names and text in map(str, range(len(task.classes))):
        return int(text)
    ids = "" if task.has_names else f" or 0 to {len(task.classes) - 1}"
    raise ValueError(f"the label {text!r} is not one of {', '.join(task.classes)}{ids}; correct or remove this line")


def _correlation(function):
    """0 if all predictions are equal, as scikit-learn has it for Matthews' coefficient; early in training they can be."""
    return lambda labels, predicted: 0.0 if np.ptp(predicted) == 0 else function(predicted, labels).statistic


METRICS = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "matthews": matthews_corrcoef,
    "pearson": _correlation(pearsonr),
    "spearman": _correlation(spearmanr),
}


class DivergedError(ValueError):
    """A prediction of a model is not finite."""


def task_metrics(task: GlueTask, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the metrics of a task by name, and `score`, their mean; all from 0 to 100 (correlations from -100).

    Args:
        task: One of `TASKS`.
        logits: (N, C) predictions of the classifier; (N,) or (N, 1) for scores.
        labels: (N,) class ids or scores.

    Raises:
        DivergedError: A prediction is not finite.
    """
    if not np.isfinite(logits).all():
        raise DivergedError(f"{task.name}: a prediction is not finite; the model has diverged, lower the learning rate")
    predicted = logits.squeeze(-1) if task.classes is None and logits.ndim == 2 else logits
    predicted = predicted if task.classes is None else predicted.argmax(-1)
    values = {name: 100 * float(METRICS[name](labels, predicted)) for name in task.metrics}
    return {**values, "score": float(np.mean(list(values.values())))}


def average(scores: Mapping[str, float], tasks: Sequence[str] = AVERAGED) -> float | None:
    """Return the mean over the tasks that the paper averages, or None if one of them has no score."""
    return float(np.mean([scores[name] for name in tasks])) if all(name in scores for name in tasks) else None
