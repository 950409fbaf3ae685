"""GLUE as in the paper (section 5.1, appendix C): tasks, original files, metrics, settings of Table 6, scores of Table 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Value, load_dataset
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from neobert_hf.finetuning import pearson, spearman

HUB_ID = "nyu-mll/glue"
PAIR, ENTAILMENT = ("sentence1", "sentence2"), ("entailment", "not_entailment")


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
        no_header: Names of the columns of a file without a header.
        file_has_names: The files have names of classes, and no ids.
        validation: Names of the validation splits on the Hub.
    """

    name: str
    folder: str
    texts: tuple[str, ...]
    classes: tuple[str, ...] | None
    metrics: tuple[str, ...] = ("accuracy",)
    file_texts: tuple[str, ...] | None = None
    file_label: str = "label"
    no_header: tuple[str, ...] = ()
    file_has_names: bool = False
    validation: tuple[str, ...] = ("validation",)


COLA_COLUMNS = ("source", "label", "mark", "sentence")
STSB_COLUMNS = ("genre", "file", "year", "index", "score", *PAIR)
MATCHED = ("validation_matched", "validation_mismatched")
TASKS = {
    task.name: task
    for task in (
        GlueTask("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews",), no_header=COLA_COLUMNS),
        GlueTask(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            file_texts=PAIR,
            file_label="gold_label",
            file_has_names=True,
            validation=MATCHED,
        ),
        GlueTask(
            "mrpc",
            "MRPC",
            PAIR,
            ("not_equivalent", "equivalent"),
            ("accuracy", "f1"),
            file_texts=("#1 String", "#2 String"),
            file_label="Quality",
        ),
        GlueTask("qnli", "QNLI", ("question", "sentence"), ENTAILMENT, file_has_names=True),
        GlueTask(
            "qqp",
            "QQP",
            ("question1", "question2"),
            ("not_duplicate", "duplicate"),
            ("accuracy", "f1"),
            file_label="is_duplicate",
        ),
        GlueTask("rte", "RTE", PAIR, ENTAILMENT, file_has_names=True),
        GlueTask("sst2", "SST-2", ("sentence",), ("negative", "positive")),
        GlueTask("stsb", "STS-B", PAIR, None, ("pearson", "spearman"), file_label="score", no_header=STSB_COLUMNS),
        GlueTask("wnli", "WNLI", PAIR, ENTAILMENT[::-1]),
    )
}
AVERAGED = tuple(name for name in TASKS if name != "wnli")  # appendix C: WNLI is excluded
FROM_MNLI = ("mrpc", "qnli", "rte", "stsb")  # appendix C: start from the best MNLI checkpoint

# Appendix C, Table 6: batch size, learning rate and weight decay of NeoBERT-1024, and of NeoBERT-4096.
TABLE_6 = {
    "cola": ((4, 6e-6, 1e-5), (8, 8e-6, 1e-5)),
    "mnli": ((16, 6e-6, 1e-2), (16, 5e-6, 1e-5)),
    "mrpc": ((8, 2e-5, 1e-5), (2, 1e-5, 1e-5)),
    "qnli": ((8, 5e-6, 1e-5), (8, 5e-6, 1e-5)),
    "qqp": ((32, 1e-5, 1e-2), (32, 8e-6, 1e-5)),
    "rte": ((8, 6e-6, 1e-5), (32, 5e-6, 1e-5)),
    "sst2": ((16, 1e-5, 1e-5), (32, 8e-6, 1e-2)),
    "stsb": ((8, 1e-5, 1e-2), (32, 2e-5, 1e-5)),
}
PRESETS = {
    name: {task: settings[column] for task, settings in TABLE_6.items()}
    for column, name in enumerate(("NeoBERT-1024", "NeoBERT-4096"))
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
        data_dir: Folder with the folders of the original archives (`SST-2`, ...), which hold train.tsv and dev.tsv; None loads
            `nyu-mll/glue`.

    Returns:
        `train` and each split of `task.validation`, with the columns of `task.texts` and `label`.

    Raises:
        ValueError: A file has other columns or no rows, or a label is not one of the task's; the message names the line.
        OSError: A file is missing or cannot be read.
    """
    splits = ("train", *task.validation)
    if data_dir is None:
        data = load_dataset(HUB_ID, task.name)
        return {split: data[split].remove_columns("idx") for split in splits}
    label = Value("float32") if task.classes is None else ClassLabel(names=list(task.classes))
    features = Features({**dict.fromkeys(task.texts, Value("string")), "label": label})
    data = {}
    for split in splits:
        rows = list(_rows(task, _file(Path(data_dir, task.folder), split.replace("validation", "dev"))))
        data[split] = Dataset.from_list(rows, features=features)
    return data


def _file(folder: Path, stem: str) -> Path:
    names = [f"{prefix}{stem}.{suffix}" for prefix in ("", "sts-") for suffix in ("tsv", "csv")]
    for name in names:
        if Path(folder, name).is_file():
            return Path(folder, name)
    raise FileNotFoundError(f"{folder} has none of {', '.join(names)}; download the original files of this task")


def _rows(task: GlueTask, file: Path) -> Iterator[dict]:
    """The rows of an original file: separated by tabs, without quotes, whatever its suffix.

    QQP has truncated lines. As other loaders do, this one leaves out a line with another number of columns.
    """
    columns = (*(task.file_texts or task.texts), task.file_label)
    first, *lines = file.read_bytes().decode("utf-8-sig").rstrip("\r\n").split("\n")
    names = first.rstrip("\r").split("\t")
    has_header = {*columns} <= {*names}
    if not has_header:
        names, lines = task.no_header, [first, *lines]
    if not {*columns} <= {*names} or not lines:
        raise ValueError(
            f"{file} has no rows with the columns {', '.join(columns)}; its first line is {first[:200]!r}; check that this is a "
            f"complete file of {task.folder}"
        )
    left_out = []
    for number, line in enumerate(lines, 1 + has_header):
        values = line.rstrip("\r").split("\t")
        if len(values) < len(names) or (has_header and len(values) > len(names)):
            left_out.append(number)
            continue
        row = dict(zip(names, values))
        *texts, label = (row[column] for column in columns)
        try:
            yield {**dict(zip(task.texts, texts)), "label": _label(task, label)}
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}; correct or remove this line") from error
    if left_out:
        print(f"{file}: left out {len(left_out)} lines with another number of columns: {left_out[:20]}", flush=True)


def _label(task: GlueTask, text: str) -> float | int:
    if task.classes is None:
        if not 0 <= float(text) <= 5:
            raise ValueError(f"the score {text} is not from 0 to 5")
        return float(text)
    # An id in a file that should have names belongs to another task: the ids of WNLI are those of RTE in reverse.
    known = task.classes if task.file_has_names else (*task.classes, *map(str, range(len(task.classes))))
    if text not in known:
        raise ValueError(f"the label {text!r} is not one of {', '.join(known)}")
    return known.index(text) % len(task.classes)


METRICS = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "matthews": matthews_corrcoef,
    "pearson": pearson,
    "spearman": spearman,
}


def task_metrics(task: GlueTask, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the metrics of a task by name, and `score`, their mean; all from 0 to 100 (correlations from -100).

    Args:
        task: One of `TASKS`.
        logits: (N, C) predictions of the classifier; (N,) or (N, 1) for scores.
        labels: (N,) class ids or scores.

    Raises:
        FloatingPointError: A prediction is not finite.
    """
    if not np.isfinite(logits).all():
        raise FloatingPointError(
            f"{task.name}: a prediction is not finite; the model has diverged, lower the learning rate"
        )
    predicted = logits.reshape(len(labels)) if task.classes is None else logits.argmax(-1)
    values = {name: 100 * float(METRICS[name](labels, predicted)) for name in task.metrics}
    return {**values, "score": float(np.mean(list(values.values())))}


def average(scores: Mapping[str, float]) -> float | None:
    """Return the mean over the tasks that the paper averages, or None if one of them has no score."""
    return float(np.mean([scores[name] for name in AVERAGED])) if scores.keys() >= {*AVERAGED} else None
