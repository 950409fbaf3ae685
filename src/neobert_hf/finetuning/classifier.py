"""Classification of texts into one class or several, and regression: model, metrics, report and predictions."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from matplotlib.figure import Figure
from scipy.special import expit, softmax
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import (
    ConfusionMatrixDisplay,
    accuracy_score,
    classification_report,
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    mean_squared_error,
)
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)
from transformers.tokenization_utils_base import LARGE_INTEGER

from ..files.texts import check_max_length
from ..files.writing import write_json, writing
from .labelled_texts import MULTI, REGRESSION, SINGLE, LabelledTexts

MOST_CLASSES = 40  # in a confusion matrix that a reader can read


def trained_labels(source: str) -> tuple[str, list[str]]:
    """Return the problem type and the names of the classes of a trained classifier.

    Args:
        source: Folder or id on the Hub.

    Raises:
        ValueError: The model is not a classifier, or it is an adapter.
        OSError: There is no such model.
    """
    if Path(source, "adapter_config.json").is_file():
        raise ValueError(
            f"{source} holds an adapter; finetune_lora.py predicts with it, and saves a whole model by --merge"
        )
    config = AutoConfig.from_pretrained(source)
    if not any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        raise ValueError(
            f"{source} is not a trained classifier; give the folder of one by --model_name_or_path, or rows to train by "
            "--train_file"
        )
    problem_type = config.problem_type or (REGRESSION if config.num_labels == 1 else SINGLE)
    return problem_type, [config.id2label[i] for i in range(config.num_labels)]


def pooling_options(source: str, classifier_pooling: str | None) -> dict[str, str]:
    """Return the options of `from_pretrained` that choose what the classifier reads; None keeps what the config says.

    Args:
        source: Folder or id on the Hub.
        classifier_pooling: "cls" or "mean" (see `NeoBERTConfig`).

    Raises:
        ValueError: The model has no such choice.
    """
    if classifier_pooling is None:
        return {}
    config = AutoConfig.from_pretrained(source)
    if not hasattr(config, "classifier_pooling"):
        raise ValueError(
            f"classifier_pooling={classifier_pooling!r}: {source} is a {config.model_type}, whose config has no such choice; "
            "leave it out"
        )
    return {"classifier_pooling": classifier_pooling}


def pearson(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return Pearson's correlation, and 0 if all predictions are equal, as they can be early in training."""
    return float(pearsonr(predicted, labels).statistic) if np.ptp(predicted) and np.ptp(labels) else 0.0


def spearman(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return Spearman's rank correlation, and 0 if all predictions are equal."""
    return float(spearmanr(predicted, labels).statistic) if np.ptp(predicted) and np.ptp(labels) else 0.0


class ClassificationTask:
    """What the labels of texts decide in a training and in an evaluation.

    Numbers are trained with mean 0 and standard deviation 1, for which the learning rates are made; `restore_numbers` then
    changes the last layer so that the model predicts the numbers of the file.

    Args:
        texts: Texts with labels.
    """

    def __init__(self, texts: LabelledTexts):
        self.texts = texts
        self.mean, self.deviation = 0.0, 1.0
        if texts.problem_type == REGRESSION and "train" in texts.data:
            numbers = np.array(texts.data["train"]["label"], np.float64)
            self.mean, self.deviation = float(numbers.mean()), float(numbers.std())

    def load_model(self, source: str, max_length: int, classifier_pooling: str | None = None) -> PreTrainedModel:
        """Load a model with a head for these labels, in float32; the head is new unless it has their number already.

        Args:
            source: Folder or id on the Hub.
            max_length: Length of the texts in tokens; the model must have as many positions.
            classifier_pooling: As in `pooling_options`.
        """
        names = dict(enumerate(self.texts.names))
        model = AutoModelForSequenceClassification.from_pretrained(
            source,
            id2label=names,
            label2id={name: i for i, name in names.items()},
            problem_type=self.texts.problem_type,  # also for a start that was fine-tuned for other labels
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            **pooling_options(source, classifier_pooling),
        )
        check_max_length(model, max_length)
        return model

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
        """Return tokens and labels of all splits; numbers are scaled for training.

        Args:
            tokenizer: In a training it gets the length, and is saved with it. Without training rows it keeps its own length.
            max_length: Length in tokens at which texts are cut.
        """
        if "train" in self.texts.data or tokenizer.model_max_length > LARGE_INTEGER:
            tokenizer.model_max_length = max_length
        columns = [name for name in next(iter(self.texts.data.values())).column_names if name != "label"]

        def tokens(rows: dict[str, list]) -> dict[str, list]:
            found = dict(tokenizer(*(rows[name] for name in columns), truncation=True))
            if self.texts.problem_type == REGRESSION and "label" in rows:
                found["label"] = [(number - self.mean) / self.deviation for number in rows["label"]]
            return found

        return self.texts.data.map(tokens, batched=True, remove_columns=columns)

    def metrics(self, predictions: EvalPrediction) -> dict[str, float]:
        """Return the metrics of this kind of labels, for Trainer.

        One class: accuracy, F1 as the mean over the classes, and Matthews' coefficient for two classes. Several classes: the
        share of rows whose classes are all right, F1 as the mean over the classes, and F1 over all decisions. Numbers: Pearson's
        and Spearman's correlation, and the mean squared error in the unit of the file.
        """
        found = label_metrics(self.texts.problem_type, predictions.label_ids, predictions.predictions)
        if self.texts.problem_type == REGRESSION:
            found["mse"] *= self.deviation**2
        return found

    @property
    def best_metric(self) -> str:
        """The metric that chooses the best epoch."""
        return "pearson" if self.texts.problem_type == REGRESSION else "f1"

    def restore_numbers(self, model: PreTrainedModel) -> None:
        """After the training, let the last layer of a regression predict numbers in the unit of the file."""
        if self.texts.problem_type != REGRESSION:
            return
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        with torch.no_grad():
            last.weight *= self.deviation
            last.bias.copy_(last.bias * self.deviation + self.mean)

    def evaluate(self, trainer: Trainer, rows: Dataset, split: str) -> np.ndarray:
        """Return the logits of a split, and report on them as `report` does.

        Args:
            trainer: Its model predicts numbers in the unit of the file.
            rows: Tokens of the split.
            split: "validation" or "test".
        """
        logits = trainer.predict(
            rows.select_columns([name for name in rows.column_names if name != "label"])
        ).predictions
        if trainer.is_world_process_zero():
            self.report(logits, split, trainer.args.output_dir)
        return logits

    def report(self, logits: np.ndarray, split: str, folder: str | Path) -> None:
        """Print and write the metrics of a split that has labels, with a report for each class and the confusion matrix.

        Args:
            logits: (N, C) logits of the N rows of the split; numbers in the unit of the file.
            split: "validation" or "test"; the files have this name.
            folder: Folder of the files.

        Raises:
            FloatingPointError: A prediction is not finite.
        """
        if not np.isfinite(logits).all():
            raise FloatingPointError("a prediction is not finite; the model has diverged, lower --learning_rate")
        rows, kind, names = self.texts.data[split], self.texts.problem_type, self.texts.names
        if "label" not in rows.column_names:
            print(f"the {split} rows have no labels, so there are no metrics", flush=True)
            return
        labels = np.array(rows["label"])
        found = label_metrics(kind, labels, logits)
        print(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()), flush=True)
        prefix = {"validation": "eval"}.get(split, split)
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(Path(folder, f"{prefix}_results.json"), {f"{prefix}_{name}": found[name] for name in found})
        if kind == REGRESSION:
            return
        predicted = decisions(kind, logits)
        options = {"labels": range(len(names)), "target_names": names, "zero_division": 0, "digits": 3}
        print(classification_report(labels, predicted, **options), flush=True)
        if kind == SINGLE and len(names) <= MOST_CLASSES:
            matrix = confusion_matrix(labels, predicted, labels=range(len(names)))
            _draw(matrix, names, Path(folder, f"confusion_matrix_{split}.png"))

    def prediction_rows(self, logits: np.ndarray, separator: str | None = None) -> list[dict]:
        """Return the test rows with a prediction, and the probability of each class.

        Args:
            logits: (N, C) logits of the N test rows.
            separator: What joins the classes of a row, if it has several; None gives lists.

        Returns:
            The columns of the file, `prediction`, and `probability_NAME` for each class. Numbers have no probability.
        """
        kind, names, rows = self.texts.problem_type, self.texts.names, []
        if kind == REGRESSION:
            return [{**row, "prediction": float(number)} for row, (number,) in zip(self.texts.test_rows, logits)]
        probabilities = (expit if kind == MULTI else lambda x: softmax(x, -1))(logits.astype(np.float64))
        for row, chosen, of_row in zip(self.texts.test_rows, decisions(kind, logits), probabilities):
            if kind == MULTI:
                labels = [name for name, is_chosen in zip(names, chosen) if is_chosen]
                prediction = labels if separator is None else separator.join(labels)
            else:
                prediction = names[chosen]
            columns = {f"probability_{name}": round(float(value), 6) for name, value in zip(names, of_row)}
            rows.append({**row, "prediction": prediction, **columns})
        return rows


def _draw(matrix: np.ndarray, names: list[str], file: Path) -> None:
    shown = [name[:30].replace("$", r"\$") for name in names]  # dollar signs begin formulas
    size = 3 + 0.4 * len(names)
    figure = Figure(figsize=(size, size), layout="constrained")
    display = ConfusionMatrixDisplay(matrix, display_labels=shown)
    display.plot(ax=figure.subplots(), cmap="Blues", colorbar=False, xticks_rotation="vertical", values_format="d")
    with writing(file) as stream, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks Chinese characters, for example
        figure.savefig(stream, format="png", dpi=120)


def decisions(problem_type: str, logits: np.ndarray) -> np.ndarray:
    """Return the predictions of (N, C) logits: (N,) class ids, (N, C) zeros and ones for several classes, or (N,) numbers."""
    if problem_type == REGRESSION:
        return logits.reshape(len(logits))
    return (logits > 0).astype(int) if problem_type == MULTI else logits.argmax(-1)


def label_metrics(problem_type: str, labels: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """Return the metrics that `ClassificationTask.metrics` lists.

    Args:
        problem_type: As in the config of a model.
        labels: (N,) class ids or numbers, or (N, C) zeros and ones.
        logits: (N, C) predictions of the model.
    """
    predicted = decisions(problem_type, logits)
    if problem_type == REGRESSION:
        return {
            "pearson": pearson(labels, predicted),
            "spearman": spearman(labels, predicted),
            "mse": float(mean_squared_error(labels, predicted)),
        }
    found = {"accuracy": accuracy_score(labels, predicted)}
    found["f1"] = f1_score(labels, predicted, average="macro", zero_division=0)
    if problem_type == MULTI:
        found["f1_micro"] = f1_score(labels, predicted, average="micro", zero_division=0)
    elif logits.shape[-1] == 2:
        found["matthews"] = matthews_corrcoef(labels, predicted)
    return {name: float(value) for name, value in found.items()}
