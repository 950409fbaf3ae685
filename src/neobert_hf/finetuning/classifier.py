"""`Classifier`: texts get one class, several classes, or a number; with metrics, a report, and predictions."""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from scipy.special import expit, softmax
from scipy.stats import pearsonr, rankdata
from sklearn.base import ClassifierMixin
from sklearn.metrics import (
    ConfusionMatrixDisplay,
    accuracy_score,
    classification_report,
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    mean_squared_error,
    r2_score,
)
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from torch import Tensor, no_grad
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BatchEncoding,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
)

from ..checkpoints import MINI_MODEL_PATH
from ..checkpoints.adapters import open_adapter, save_adapter, set_label_type
from ..data.lengths import Truncation, beginning, fact_of_truncated, tokens_lost
from ..files.messages import say
from ..files.output import content_hash, writing
from ..runs import FineTuningArguments
from ..runs.arguments import EPOCHS, EPOCHS_OF_FEW
from .baseline import tfidf_outputs
from .head import WEAK, choose_strength, cross_validated, fit_linear, inputs_of_last_layer, last_layer
from .job import CROSS_VALIDATION, Job, all_or_nothing
from .rows import check_known, given_names, labels_of, listed
from .summary import say_worst
from .texts import MULTI, REGRESSION, SINGLE, clean_label, kind_of, of_kind, one_or_pair, text_classes

if TYPE_CHECKING:
    from peft import LoraConfig

MOST_CLASSES = 40  # in a confusion matrix that a reader can read
# With fewer rows of each class, and at most this number of rows, a last layer on frozen vectors is the better start.
FEW_OF_CLASS, FEW_TEXTS = 100, 2000


class Classifier(ClassifierMixin, Job):
    """Texts, or pairs of texts, get a class, several classes, or a number.

    A label is a string or a whole number (one class), a list of strings (several classes), or a number (regression). Numbers are
    trained with mean 0 and standard deviation 1, for which the learning rates are made; the saved model predicts in their unit.
    If all labels of `fit` are numbers, or booleans, `predict` and `classes_` have this type, also of a model that is opened from
    the saved folder; files of predictions have strings. `classes_` and the columns of `predict_proba` have numpy's order.

    Args:
        model: Folder or id on the Hub: of an encoder, of a trained classifier, or a folder of an adapter that `save` wrote.
        max_seq_length: Length in tokens at which the texts of a training are cut. A trained model keeps its own.
        classifier_pooling: "cls" or "mean": what the classifier reads of a text. None keeps what the config of the model says, or
            takes the mean if the last layer is fitted first.
        adapter: As of `lora_config`; `fit` then trains an adapter and not the model.
        head_first: Whether `fit` begins with the last layer alone, on the vectors of the frozen encoder, see `fit_linear`. None
            does so for a new classifier with fewer than 100 rows of each class, and fewer than 2,000 in all.
        verbose: Tell what `fit`, `evaluate`, `predict` and `save` find; False leaves warnings and errors only.
        truncation: What becomes of texts that are longer than the model reads: "warn" counts them in a line, "error" refuses
            them before anything is trained or predicted, "off" allows them.
        learning_rate: As of the training arguments of `fit`, but a parameter, which a search can vary; None leaves it to them.
        num_train_epochs: As `learning_rate`.
        per_device_train_batch_size: As `learning_rate`.
        random_state: As `learning_rate`; the `seed` of the training.
        class_weight: "balanced", or a dict from class to weight, as in scikit-learn, if a row has one class.
    """

    auto_class = AutoModelForSequenceClassification
    kind = "classes"
    noun = "classifier"
    problem_type: str  # of `fit`, or of the trained model as soon as `classes_` are read
    _mean, _deviation = 0.0, 1.0

    def __init__(
        self,
        model: str | Path = MINI_MODEL_PATH,
        max_seq_length: int = 512,
        classifier_pooling: str | None = None,
        adapter: LoraConfig | None = None,
        head_first: bool | None = None,
        verbose: bool = True,
        truncation: Truncation = "warn",
        learning_rate: float | None = None,
        num_train_epochs: float | None = None,
        per_device_train_batch_size: int | None = None,
        random_state: int | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
    ):
        super().__init__(model, max_seq_length, verbose)
        self.classifier_pooling, self.adapter, self.head_first = classifier_pooling, adapter, head_first
        self.truncation = truncation
        self.learning_rate = learning_rate
        self.num_train_epochs = num_train_epochs
        self.per_device_train_batch_size = per_device_train_batch_size
        self.random_state = random_state
        self.class_weight = class_weight

    def _begin(self) -> None:
        if self.adapter and self.classifier_pooling:  # its folder has no config of the model
            found = f"classifier_pooling={self.classifier_pooling!r}"
            raise ValueError(f"{found}, but an adapter keeps that of its base; omit it")
        super()._begin()
        self._crossed: list[str] | None = None  # labels of a cross-validation, if it gives the metrics
        self._label_type: str | None = None  # of the labels: int, float or bool; None for texts
        self._weights: np.ndarray | None = None  # of the training rows

    def _read_labels(self) -> None:
        super()._read_labels()
        self._label_type = self._given.label_type
        self.problem_type = self._given.problem_type

    def _load_trained(self) -> PreTrainedModel:
        if not self._given.is_adapter:
            return super()._load_trained()
        return open_adapter(self.auto_class, self._source, dtype="float32")

    def _load_new(self, **options) -> PreTrainedModel:
        # the problem type also for a start that was fine-tuned for other labels
        options["problem_type"] = self.problem_type
        if self._pooling:
            options["classifier_pooling"] = self._pooling
        model = super()._load_new(**options)
        set_label_type(model.config, self._label_type)
        if self.adapter:
            from peft import get_peft_model

            model = get_peft_model(model, copy.deepcopy(self.adapter))  # PEFT writes into it
            if self.verbose:
                model.print_trainable_parameters()
        return model

    def _learning_rate(self, config: PretrainedConfig) -> float:
        return super()._learning_rate(config) * (10 if self.adapter else 1)

    def _num_epochs(self, num_rows: int) -> int:
        if self._is_short:
            return max(4, min(EPOCHS_OF_FEW, 2500 // num_rows))
        return EPOCHS_OF_FEW if self._is_head_first else EPOCHS

    def _identity(self) -> dict[str, Any]:
        found = {"problem_type": self.problem_type, "classifier_pooling": self.classifier_pooling}
        if self._weights is not None:
            found["weights"] = content_hash(self._weights.tolist())
        # sets become lists; their order differs between processes
        adapter = json.loads(json.dumps(self.adapter.to_dict(), default=sorted)) if self.adapter else {}
        adapter = {name: value for name, value in adapter.items() if value}
        return found | {"head_first": self._is_head_first, "adapter": adapter}

    def _row(self, text: Any, *label) -> tuple:
        text = listed(text)
        if isinstance(text, list) and len(text) != 2:
            raise ValueError(f"{len(text)} texts; give one text, or a pair")
        text = one_or_pair(dict(zip(("text 1", "text 2"), text)) if isinstance(text, list) else {"text": text})
        return (text, *(clean_label(one, self.problem_type) for one in label))

    @all_or_nothing
    def fit(
        self,
        texts: Sequence[str | tuple[str, str]],
        labels: Sequence[Any],
        validation: tuple[Sequence, Sequence] | None = None,
        training: FineTuningArguments | None = None,
        *,
        classes: Sequence[str] | None = None,
        problem_type: str = "auto",
        is_held_out: bool = False,
        sample_weight: Sequence[float] | None = None,
        **options,
    ) -> Classifier:
        """Train on texts and labels.

        Args:
            texts: Texts, or pairs of texts.
            labels: Label of each text.
            validation: Other texts and labels. They choose the best epoch, and the metrics on them are printed at the end.
            training: Training arguments; their folder gets checkpoints, and the metrics.
            classes: Names of the classes in the order of the logits; by default the sorted labels.
            problem_type: As in the config of a model; "auto" decides by the labels as `kind_of` does.
            is_held_out: Whether the validation rows are training rows that a reader held out. If the training begins with the
                last layer, and a row has one class, they are trained on too. A cross-validation of the last layer on the vectors
                of the frozen encoder then gives the metrics.
            sample_weight: Weight of each training row in the loss, if a row has one class; 0 leaves a row out.
            options: Training arguments by name, instead of `training`. Without `output_dir`, no file stays.

        Raises:
            ValueError: A row has a fault, nothing can be learned from the labels, or the start is an adapter.
            FloatingPointError: The model has diverged.
        """
        if self._given.is_adapter:
            remedy = "merge it first (`merge`, `save`), or give its base model and adapter=lora_config(...)"
            raise ValueError(f"{self._source} is an adapter, whose weights are not trained again; {remedy}")
        config = AutoConfig.from_pretrained(self._source)
        if self.classifier_pooling and not hasattr(config, "classifier_pooling"):
            raise ValueError(f"{self._source} has no classifier_pooling in its config; omit classifier_pooling")
        options = self._with_parameters(options)
        self.problem_type = problem_type
        given = self._listed(texts, labels)
        texts, labels = self._columns(*given)
        self._names = given_names(classes)
        if problem_type == "auto":
            self.problem_type = kind_of(labels)
            labels = [of_kind(label, self.problem_type) for label in labels]
        kind = self.problem_type
        if kind == REGRESSION:
            self._names = self._names or ["label"]
            self._best_metric = "pearson"
        else:
            values = [value for label in given[1] for value in labels_of(listed(label))]
            for value in np.array(values).tolist()[:1]:  # all have one type now
                if not isinstance(value, str):
                    self._label_type = type(value).__name__
            if problem_type == "auto" or not self._names:  # a reader that knows both has said what is odd
                self._names = text_classes(texts, labels, self._names)
        if sample_weight is not None or self.class_weight is not None:
            texts, labels = self._weigh([texts, labels], given[1], sample_weight)
        if kind != MULTI:
            check_learnable(labels)
        is_new = not self._is_trained or config.num_labels != len(self._names)
        is_few = len(texts) < min(FEW_TEXTS, FEW_OF_CLASS * len(self._names)) and kind != REGRESSION
        self._is_head_first = is_new and is_few if self.head_first is None else self.head_first
        # the first token of a frozen encoder says less; an adapter keeps the pooling of its base
        has_mean = self._is_head_first and hasattr(config, "classifier_pooling") and not self.adapter
        self._pooling = self.classifier_pooling or ("mean" if has_mean else None)
        # larger models, and adapters, were not compared
        self._is_small = not self.adapter and config.hidden_size <= 384
        self._is_short = self._is_small and self._is_head_first and kind == SINGLE
        can_cross = self._is_head_first and kind == SINGLE and sum(n > 1 for n in Counter(labels).values()) > 1
        if validation and is_held_out and can_cross and self._weights is None:
            held_out = self._columns(*validation)
            self.encode(held_out[1])  # which refuses an unknown class
            texts, labels = (a + b for a, b in zip((texts, labels), held_out))
            validation = None
            self._crossed = labels
            self._num_repeated = len(texts) - len({*map(str, texts)})
            fact = f"{len(texts)} rows are few: all of them are trained on, and the metrics are those of a"
            say(f"{fact} {CROSS_VALIDATION} alone, before the other layers are trained")
        self._fit((texts, labels), validation, training, options)
        return self

    def _with_parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        """Training arguments with those among the parameters; an error if one is given twice."""
        every = self.get_params(deep=False) | {"seed": self.random_state}
        known = FineTuningArguments.__dataclass_fields__
        given = {name: np.array(value).item() for name, value in every.items() if name in known and value is not None}
        for name in options.keys() & every.keys():
            if name in given or name not in known:
                found = f"{name}={options[name]!r:.80} of fit, and {name}={every[name]!r:.80} of the {self.noun}"
                raise ValueError(f"{found} are two values; give one, to the latter")
        return options | given

    def _weigh(self, columns: list[list], labels: list, sample_weight: Sequence[float] | None) -> list[list]:
        """Columns without the rows of weight 0; the weights of the others, times those of their classes, are kept."""
        if self.problem_type != SINGLE:
            raise ValueError(f"weights are for rows of one class, not for {self.problem_type}; repeat rows instead")
        weights = np.ones(len(labels)) if sample_weight is None else np.array([*sample_weight], float)
        if weights.shape != (len(labels),) or min(weights) < 0 or not 0 < weights.sum() < np.inf:
            rule = f"give each of the {len(labels)} rows a number of at least 0, and not only 0"
            raise ValueError(f"sample_weight={weights.tolist()!r:.80}; {rule}")
        kept = np.flatnonzero(weights)
        self._weights = weights[kept] * compute_sample_weight(self.class_weight, np.array(labels)[kept])
        return [[column[i] for i in kept] for column in columns]

    @property
    def _values(self) -> np.ndarray:
        """The classes in the order of the logits, in the type of the labels; texts if somebody has renamed one."""
        names = self._classes
        if self._label_type:
            with suppress(ValueError):
                return np.array([json.loads(name.lower()) for name in names], self._label_type)
        return np.array(names)

    @property
    def classes_(self) -> np.ndarray:
        """The classes in numpy's order, in the type of the labels of `fit`.

        Raises:
            NotFittedError: The model is not trained for this job; it is a ValueError and an AttributeError.
        """
        return np.sort(self._values)

    def predict(self, texts: Sequence[str | tuple[str, str]]) -> list:
        """Return for each text its class, the list of its classes, or its number; the classes are those of `classes_`."""
        found = super().predict(texts)
        values = dict(zip(self._classes, self._values.tolist()))
        if self.problem_type == MULTI:
            return [sorted(values[name] for name in of_row) for of_row in found]
        return [values.get(one, one) for one in found]

    @available_if(lambda job: not job.__sklearn_is_fitted__() or job.problem_type != REGRESSION)
    def predict_proba(self, texts: Sequence[str | tuple[str, str]]) -> np.ndarray:
        """Return the (N, C) probabilities of `classes_` for N texts; a regression has none."""
        return self._scores(self.outputs(texts))[:, np.argsort(self._values)]

    def score(
        self,
        texts: Sequence[str | tuple[str, str]],
        labels: Sequence[Any],
        sample_weight: Sequence[float] | None = None,
    ) -> float:
        """Return the accuracy; the share of rows whose classes are all right, if a row has several; R2 of numbers."""
        _ = self._classes  # which say how labels are read
        lists = self._listed(texts, labels)
        _, labels = self._columns(*lists)
        found = self._decide(self.outputs(lists[0]))
        if self.problem_type == MULTI:
            labels, found = ([str(sorted(classes)) for classes in rows] for rows in (labels, found))
        metric = r2_score if self.problem_type == REGRESSION else accuracy_score
        return float(metric(labels, found, sample_weight=sample_weight))

    def encode(self, labels: Sequence[Any]) -> list:
        """Return labels as the model learns them: numbers of classes, zeros and ones for each class, or numbers."""
        numbers = {name: number for number, name in enumerate(self._classes)}  # which say how labels are read
        if self.problem_type == REGRESSION:
            return np.array(labels, np.float32).tolist()  # as the model computes
        for i, label in enumerate(labels):
            check_known(label if isinstance(label, list) else [label], numbers, f"label {i}: ")
        if self.problem_type == MULTI:
            return [[float(name in of_row) for name in numbers] for of_row in labels]
        return [numbers[label] for label in labels]

    def _rows(self, texts: Sequence, labels: Sequence | None = None, is_training: bool = False) -> Dataset:
        tokenizer = self.tokenizer
        if len({isinstance(text, tuple) for text in texts}) > 1:
            raise ValueError("some rows are one text, and others a pair; give one kind")
        columns = zip(*texts) if isinstance(texts[0], tuple) else [texts]
        rows = Dataset.from_dict({f"text{i}": list(column) for i, column in enumerate(columns)})

        def tokens(part: dict[str, list]) -> BatchEncoding:
            columns = [[beginning(text, tokenizer) for text in column] for column in part.values()]
            return tokenizer(*columns, truncation=True)

        rows, limit = rows.map(tokens, batched=True, remove_columns=rows.column_names), tokenizer.model_max_length
        full = [text for text, ids in zip(texts, rows["input_ids"]) if len(ids) >= limit]
        lost = tokens_lost(tokenizer, limit, full)
        self._truncated = fact_of_truncated(lost, len(texts), limit, self.truncation)
        if labels is None:
            return rows
        targets = self.encode(labels)
        if self.problem_type == REGRESSION:
            if is_training:
                self._mean, self._deviation = float(np.mean(targets)), float(np.std(targets))
            targets = [(number - self._mean) / self._deviation for number in targets]
        return rows.add_column("label", targets)

    def _metrics_of_epoch(self, found: Any, rows: Dataset, validation: Sequence) -> dict[str, float]:
        scores = label_metrics(self.problem_type, found.label_ids, found.predictions)
        return scores | ({"mse": scores["mse"] * self._deviation**2} if self.problem_type == REGRESSION else {})

    def _before_training(self, trainer: Trainer) -> None:
        """Fit the last layer alone, if this is wanted, and put weights into the rows."""
        rows = trainer.train_dataset
        if self._is_head_first:
            self._fit_head(trainer, rows)
        if self._weights is not None:  # behind the label: Trainer drops columns that the model does not read
            labels = np.column_stack([rows["label"], self._weights / self._weights.mean()])
            trainer.train_dataset = rows.remove_columns("label").add_column("label", labels.tolist())
            trainer.compute_loss_func = weighted_loss

    def _fit_head(self, trainer: Trainer, rows: Dataset) -> None:
        model = trainer.model
        labels = np.array(rows["label"])
        inputs = rows.select_columns([name for name in self.tokenizer.model_input_names if name in rows.column_names])
        vectors = inputs_of_last_layer(model, inputs, trainer.data_collator, trainer.args.eval_batch_size)
        layer, kind = last_layer(model), self.problem_type
        strength = None if kind == REGRESSION else choose_strength(vectors, labels, kind)
        if strength and self._crossed:
            self._crossed_logits = cross_validated(vectors, labels, layer.out_features, strength)
        if strength and self._is_short:
            strength = min(strength, WEAK)
        weight, bias = fit_linear(vectors, labels, layer.out_features, kind, strength, self._weights)
        with no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)

    def _after_training(self) -> None:
        """Let the last layer of a regression predict numbers in the unit of the labels; report on a cross-validation."""
        if self._crossed:
            if self._num_repeated:
                fact = f"{CROSS_VALIDATION}: {self._num_repeated:,} of {len(self._crossed):,} rows repeat the text of another row"
                self._remark(f"{fact}, so the scores are too good", "remove repeated rows")
            self._report(self._crossed_logits, self._crossed, CROSS_VALIDATION, Path(self._opened().args.output_dir))
        if self.problem_type == REGRESSION:
            last = last_layer(self.model_)
            with no_grad():
                last.weight *= self._deviation
                last.bias.copy_(last.bias * self._deviation + self._mean)

    def _decide(self, logits: np.ndarray) -> list:
        found = decisions(self.problem_type, logits)
        if self.problem_type == REGRESSION:
            return found.astype(float).tolist()
        if self.problem_type == MULTI:
            return [[name for name, is_chosen in zip(self._classes, row) if is_chosen] for row in found]
        return [self._classes[i] for i in found]

    def _scores(self, logits: np.ndarray) -> np.ndarray:
        logits = logits.astype(np.float64)
        return expit(logits) if self.problem_type == MULTI else softmax(logits, -1)

    def metrics(self, outputs: np.ndarray, labels: Sequence[Any]) -> dict[str, float]:
        """Return the metrics that `label_metrics` describes."""
        return label_metrics(self.problem_type, np.array(self.encode(labels)), outputs)

    def _trivial(self, labels: Sequence[Any]) -> tuple[np.ndarray, str]:
        """The most frequent class, the classes of at least half of the rows, or the mean."""
        numbers = np.array(self.encode(labels))
        if self.problem_type == REGRESSION:
            return np.full(len(numbers), numbers.mean()), f"the mean {numbers.mean():.4g}"
        if self.problem_type == SINGLE:
            logits = np.eye(len(self._classes))[np.bincount(numbers).argmax()]
        else:
            logits = np.where(numbers.mean(0) < 0.5, -1, 1)
        chosen = [name for name, logit in zip(self._classes, logits) if logit > 0]
        return np.tile(logits, (len(numbers), 1)), f"always {', '.join(chosen) or 'no class'}"

    def _tfidf(self, inputs: Sequence | None) -> np.ndarray | str | None:
        """Outputs of TF-IDF with logistic regression, or with ridge regression for numbers."""
        if not self._learned:
            return None
        texts, labels = self._learned
        return tfidf_outputs(texts, np.array(self.encode(labels)), self.problem_type, len(self._classes), inputs)

    def _report_classes(self, outputs: np.ndarray, labels: list, report: Path, picture: Path) -> None:
        """Write precision, recall and F1 of each class, print the lowest ones, and draw the confusion matrix."""
        if self.problem_type == REGRESSION:
            return
        labels, predicted = self.encode(labels), decisions(self.problem_type, outputs)
        numbers = range(len(self._classes))
        table = classification_report(
            labels, predicted, labels=numbers, target_names=self._classes, zero_division=0, digits=3
        )
        with writing(report) as stream:
            stream.write(table.encode())
        of_classes = f1_score(labels, predicted, labels=numbers, average=None, zero_division=0)
        say_worst(dict(zip(self._classes, of_classes)))
        if self.problem_type == SINGLE and len(numbers) <= MOST_CLASSES:
            draw_matrix(confusion_matrix(labels, predicted, labels=numbers), self._classes, picture)

    def prediction_rows(self, outputs: np.ndarray, rows: list[dict], separator: str | None = None) -> list[dict]:
        """Return rows with `prediction`, and `probability_NAME` for each class.

        Args:
            outputs: (N, C) logits of the N rows.
            rows: Their columns.
            separator: What joins the classes of a row, if it has several; None gives lists.
        """
        predictions, found = self._decide(outputs), []
        if self.problem_type == REGRESSION:
            return [{**row, "prediction": number} for row, number in zip(rows, predictions)]
        for row, chosen, scores in zip(rows, predictions, self._scores(outputs)):
            chosen = separator.join(chosen) if separator and self.problem_type == MULTI else chosen
            columns = {f"probability_{name}": round(float(score), 6) for name, score in zip(self._classes, scores)}
            found.append({**row, "prediction": chosen, **columns})
        return found

    def _save_weights(self, folder: str | Path) -> None:
        if not hasattr(self.model_, "merge_and_unload"):  # of an adapter
            super()._save_weights(folder)
        elif self._opened().args.should_save:
            save_adapter(self.model_, folder)
            self.tokenizer.save_pretrained(folder)

    def merge(self) -> None:
        """Add the adapter to the weights of the model; `save` then writes a whole model. A later `fit` trains a new adapter.

        Raises:
            ValueError: The model has no adapter, or is not trained.
        """
        if not hasattr(self.model_, "merge_and_unload"):
            raise ValueError(f"{self._source} has no adapter to merge; call fit with adapter=..., or open its folder")
        self._opened().model = self.model_.merge_and_unload()


def weighted_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Return the mean over rows of weight times cross-entropy, for Trainer.

    Args:
        outputs: (B, C) logits of a model.
        labels: (B, 2) class ids and weights; or (B,) class ids of an evaluation.
        num_items_in_batch: Number of values in the labels of a step; None takes this batch.
    """
    ids, *weights = labels.reshape(len(labels), -1).T
    losses = cross_entropy(outputs.logits.float(), ids.long(), reduction="none")
    for of_rows in weights:
        losses *= of_rows
    return losses.sum() * (1 + len(weights)) / (num_items_in_batch or labels.numel())


def check_learnable(labels: list) -> None:
    """Raise ValueError if all labels are equal, or are numbers that are equal in float32."""
    if len(set(labels)) < 2:
        hint = "give others, or validation rows (validation_file), so that none of them is held out"
        raise ValueError(f"all training rows have the label {labels[0]!r}, so nothing can be learned; {hint}")
    if isinstance(labels[0], str):
        return
    with np.errstate(over="ignore", invalid="ignore"):
        is_learnable = np.std(labels) > np.spacing(np.float32(np.abs(labels).max()))
    if not is_learnable:  # also if one is too large for float32
        ends = f"the labels, from {min(labels)!r} to {max(labels)!r}, cannot be told apart in float32"
        raise ValueError(f"{ends}, in which a model predicts; subtract a constant, or choose another unit")


def draw_matrix(matrix: np.ndarray, names: list[str], file: Path) -> None:
    """Draw a (C, C) confusion matrix into a PNG file."""
    from matplotlib.figure import Figure  # whose import takes half a second

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
    """Return the metrics of a kind of labels.

    One class: accuracy, F1 as the mean over the classes, and Matthews' coefficient for two classes. Several classes: the share of
    rows whose classes are all right, F1 as the mean over the classes, and F1 over all decisions. Numbers: Pearson's and
    Spearman's correlation, and the mean squared error.

    Args:
        problem_type: As in the config of a model.
        labels: (N,) class ids or numbers, or (N, C) zeros and ones.
        logits: (N, C) predictions of the model.
    """
    predicted = decisions(problem_type, logits)
    if problem_type == REGRESSION:
        found = {"pearson": pearson(labels, predicted), "spearman": spearman(labels, predicted)}
        return found | {"mse": float(mean_squared_error(labels, predicted))}
    found = {"accuracy": accuracy_score(labels, predicted)}
    found["f1"] = f1_score(labels, predicted, average="macro", zero_division=0)
    if problem_type == MULTI:
        found["f1_micro"] = f1_score(labels, predicted, average="micro", zero_division=0)
    elif logits.shape[-1] == 2:
        is_constant = len({*labels, *predicted}) == 1  # scikit-learn warns
        found["matthews"] = 0 if is_constant else matthews_corrcoef(labels, predicted)
    return {name: float(value) for name, value in found.items()}


def pearson(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return Pearson's correlation, and 0 if all predictions are equal, as they can be early in training."""
    return float(pearsonr(predicted, labels).statistic) if np.ptp(predicted) and np.ptp(labels) else 0.0


def spearman(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return Spearman's rank correlation, and 0 if all predictions are equal."""
    return pearson(rankdata(labels), rankdata(predicted))
