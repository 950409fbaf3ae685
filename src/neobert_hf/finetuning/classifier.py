"""`Classifier`: texts get one class, several classes, or a number; with metrics, a report, and predictions."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score, classification_report, confusion_matrix, f1_score, r2_score
from sklearn.utils.metaestimators import available_if
from tabulate import tabulate
from torch import no_grad
from torch.random import fork_rng
from transformers import AutoConfig, AutoModelForSequenceClassification, BatchEncoding, PreTrainedModel, Trainer

from ..checkpoints import MINI_MODEL_PATH
from ..checkpoints.adapters import open_adapter, save_adapter, set_label_type
from ..data.lengths import DEFAULT_LENGTH, Truncation, beginning, fact_of_truncated, tokens_lost
from ..files.messages import first_of, say
from ..runs import FineTuningArguments
from .baseline import tfidf_outputs
from .decorators import all_or_nothing
from .figures import decisions, label_metrics, trivial_logits
from .findings import CROSS_VALIDATION, Scores
from .head import WEAK, choose_strength, cross_validated, fit_linear, inputs_of_last_layer, last_layer, weighted_loss
from .job import TRAINING, VALIDATION, Job
from .plan import Plan, plan_fit, weigh
from .rows import check_known, given_names, labels_of, listed
from .scores import label_columns, scores_of
from .summary import say_worst, write_report
from .texts import MULTI, REGRESSION, SINGLE, clean_label, kind_of, of_kind, one_or_pair, text_classes

if TYPE_CHECKING:
    from peft import LoraConfig

Texts = Sequence[str | tuple[str, str]]

MOST_CLASSES = 40  # in a confusion matrix that a reader can read
FROZEN = "frozen vectors and a linear model"
LABEL_TYPES = {"i": "int", "u": "int", "f": "float", "b": "bool"}  # by the kind of numpy; others are texts


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

    def __init__(
        self,
        model: str | Path = MINI_MODEL_PATH,
        max_seq_length: int = DEFAULT_LENGTH,
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
        self.classifier_pooling = classifier_pooling
        self.adapter = adapter
        self.head_first = head_first
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
        self._label_type: str | None = None  # of the labels: int, float or bool; None for texts

    def _read_labels(self) -> None:
        super()._read_labels()
        self._label_type = self._given.label_type
        self.problem_type = self._given.problem_type

    def _load_trained(self) -> PreTrainedModel:
        if not self._given.is_adapter:
            return super()._load_trained()
        return open_adapter(self.auto_class, self._source, dtype="float32")

    def _load_new(self, plan: Plan, **options) -> PreTrainedModel:
        if plan.pooling:
            options["classifier_pooling"] = plan.pooling
        # the problem type also for a start that was fine-tuned for other labels
        model = super()._load_new(plan, problem_type=self.problem_type, **options)
        set_label_type(model.config, self._label_type)
        if self.adapter:
            from peft import get_peft_model

            model = get_peft_model(model, copy.deepcopy(self.adapter))  # PEFT writes into it
            if self.verbose:
                model.print_trainable_parameters()
        return model

    def _row(self, text: Any, *label) -> tuple:
        text = listed(text)
        named = {"text": text}
        if isinstance(text, list):
            first, second = text
            named = {"text 1": first, "text 2": second}
        return one_or_pair(named), *(clean_label(one, self.problem_type) for one in label)

    @all_or_nothing
    def fit(
        self,
        texts: Texts,
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
            TypeError: An option is no training argument, or is a parameter of the classifier too.
            FloatingPointError: The model has diverged.
        """
        if self._given.is_adapter:
            remedy = "merge it first (`merge`, `save`), or give its base model and adapter=lora_config(...)"
            raise ValueError(f"{self._source} is an adapter, whose weights are not trained again; {remedy}")
        given = self._listed(texts, labels)
        columns = self._read_rows(given, classes, problem_type)
        weights = None
        if sample_weight is not None or self.class_weight is not None:
            if self.problem_type != SINGLE:
                fault = f"weights are for rows of one class, not for {self.problem_type}"
                raise ValueError(f"{fault}; repeat rows instead")
            columns, weights = weigh(columns, given[1], sample_weight, self.class_weight)
        config = AutoConfig.from_pretrained(self._source)
        plan = plan_fit(
            columns,
            validation and self._columns(*validation),
            weights,
            self.problem_type,
            len(self._names),
            self.get_params(deep=False),
            config,
            is_head_new=not self._is_trained or config.num_labels != len(self._names),
            is_held_out=is_held_out,
        )
        if plan.is_crossed:
            fact = f"{len(plan.columns[0])} rows are few: all of them are trained on, and the metrics are those of a"
            say(f"{fact} {CROSS_VALIDATION} alone, before the other layers are trained")
        self._fit(plan, training, self._with_parameters(options))
        return self

    def _read_rows(self, given: list[list], classes: Sequence[str] | None, problem_type: str) -> list[list]:
        """Checked columns; the kind of the labels, their type and the names of the classes are kept."""
        self.problem_type = problem_type
        texts, labels = self._columns(*given)
        if problem_type == "auto":
            self.problem_type = kind_of(labels)
            labels = [of_kind(label, self.problem_type) for label in labels]
        self._names = given_names(classes)
        if self.problem_type == REGRESSION:
            self._names = self._names or ["label"]
            return [texts, labels]
        values = [value for label in given[1] for value in labels_of(listed(label))]
        self._label_type = LABEL_TYPES.get(np.array(values).dtype.kind)
        if problem_type == "auto" or not self._names:  # a reader that knows both has said what is odd
            self._names = text_classes(texts, labels, self._names)
        return [texts, labels]

    def _with_parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        """Training arguments with those among the parameters; TypeError if one is given twice."""
        parameters = self.get_params(deep=False) | {"seed": self.random_state}
        known = FineTuningArguments.__dataclass_fields__
        given = {name: value for name, value in parameters.items() if name in known and value is not None}
        return dict(
            **options,
            **{name: np.array(value).item() for name, value in given.items()},
        )

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

    def predict(self, texts: Texts) -> list:
        """Return for each text its class, the list of its classes, or its number; the classes are those of `classes_`."""
        found = self._decide(self.outputs(texts), self._values)
        return [sorted(of_row) for of_row in found] if self.problem_type == MULTI else found

    @available_if(lambda job: not job.__sklearn_is_fitted__() or job.problem_type != REGRESSION)
    def predict_proba(self, texts: Texts) -> np.ndarray:
        """Return the (N, C) probabilities of `classes_` for N texts; a regression has none."""
        return scores_of(self.outputs(texts), self.problem_type)[:, np.argsort(self._values)]

    def score(
        self,
        texts: Texts,
        labels: Sequence[Any],
        sample_weight: Sequence[float] | None = None,
    ) -> float:
        """Return the accuracy; the share of rows whose classes are all right, if a row has several; R2 of numbers."""
        outputs, labels = self._measured(texts, labels)
        found = self._decide(outputs)
        if self.problem_type == REGRESSION:
            return float(r2_score(labels, found, sample_weight=sample_weight))
        if self.problem_type == MULTI:
            labels, found = ([str(sorted(classes)) for classes in rows] for rows in (labels, found))
        return float(accuracy_score(labels, found, sample_weight=sample_weight))

    def encode(self, labels: Sequence[Any]) -> list:
        """Return labels as the model learns them: numbers of classes, zeros and ones for each class, or numbers."""
        numbers = {name: number for number, name in enumerate(self._classes)}  # which say how labels are read
        if self.problem_type == REGRESSION:
            return np.array(labels, np.float32).tolist()  # as the model computes
        for i, label in enumerate(labels):
            check_known(labels_of(label), numbers, f"label {i}: ")
        if self.problem_type == MULTI:
            return [[float(name in of_row) for name in numbers] for of_row in labels]
        return [numbers[label] for label in labels]

    def _rows(
        self,
        texts: Sequence,
        labels: Sequence | None = None,
        split: str | None = None,
    ) -> Dataset:
        if len({isinstance(text, tuple) for text in texts}) > 1:
            raise ValueError("some rows are one text, and others a pair; give one kind")
        tokenizer = self.tokenizer
        columns = zip(*texts) if isinstance(texts[0], tuple) else [texts]
        rows = Dataset.from_dict({f"text{i}": list(column) for i, column in enumerate(columns)})

        def tokens(part: dict[str, list]) -> BatchEncoding:
            columns = [[beginning(text, tokenizer) for text in column] for column in part.values()]
            return tokenizer(*columns, truncation=True)

        rows = rows.map(tokens, batched=True, remove_columns=rows.column_names)
        self._count_truncated(texts, rows, split)
        if labels is None:
            return rows
        targets = self.encode(labels)
        if self.problem_type == REGRESSION:
            mean, deviation = self._plan.mean, self._plan.deviation
            targets = [(number - mean) / deviation for number in targets]
        return rows.add_column("label", targets)

    def _count_truncated(self, texts: Sequence, rows: Dataset, split: str | None) -> None:
        """Say how many of the texts are truncated; those of a training are in its record too."""
        limit = self.tokenizer.model_max_length
        full = [text for text, ids in zip(texts, rows["input_ids"]) if len(ids) >= limit]
        lost = tokens_lost(self.tokenizer, limit, full)
        fact = fact_of_truncated(lost, len(texts), limit, self.truncation)
        if fact and split == TRAINING:
            self._findings.warn(f"{split}: {fact}", "choose max_seq_length")
        elif fact and not split:
            say(f"{fact}; choose max_seq_length")

    def _metrics_of_epoch(self, plan: Plan, found: Any, rows: Dataset) -> Scores:
        scores = label_metrics(self.problem_type, found.label_ids, found.predictions)
        if self.problem_type == REGRESSION:
            scores["mse"] *= plan.deviation**2
        return scores

    def _before_training(self, plan: Plan, trainer: Trainer) -> None:
        """Fit the last layer alone, if this is wanted, and put weights into the rows."""
        rows = trainer.train_dataset
        if plan.is_head_first:
            self._fit_head(plan, trainer, rows)
        if plan.weights is not None:  # behind the label: Trainer drops columns that the model does not read
            labels = np.column_stack([rows["label"], plan.weights / plan.weights.mean()])
            trainer.train_dataset = rows.remove_columns("label").add_column("label", labels.tolist())
            trainer.compute_loss_func = weighted_loss

    def _fit_head(self, plan: Plan, trainer: Trainer, rows: Dataset) -> None:
        vectors, labels = inputs_of_last_layer(trainer, rows), np.array(rows["label"])
        layer = last_layer(trainer.model)
        fit = partial(fit_linear, vectors, labels, layer.out_features, self.problem_type, weights=plan.weights)
        strength = choose_strength(vectors, labels, self.problem_type)
        weight, bias = fit(strength)
        if plan.is_crossed:
            self._crossed_logits = cross_validated(vectors, labels, layer.out_features, strength)
        elif trainer.eval_dataset is not None:
            with fork_rng(devices=()):  # a DataLoader draws a number, and the training has the same ones without this
                logits = inputs_of_last_layer(trainer, trainer.eval_dataset) @ weight.numpy().T + bias.numpy()
            self._findings.frozen = logits * plan.deviation + plan.mean
        if plan.is_head_weak:
            weight, bias = fit(min(strength, WEAK))
        with no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)

    def _after_training(self, plan: Plan) -> None:
        """Let the last layer of a regression predict numbers in the unit of the labels; report on a cross-validation."""
        if plan.is_crossed:
            texts, labels = plan.columns
            num_repeated = len(texts) - len({*map(str, texts)})
            if num_repeated:
                fact = f"{CROSS_VALIDATION}: {num_repeated:,} of {len(texts):,} rows repeat the text of another row"
                self._findings.warn(f"{fact}, so the scores are too good", "remove repeated rows")
            self._report(
                self._crossed_logits,
                labels,
                CROSS_VALIDATION,
                Path(self._opened().args.output_dir),
                title=FROZEN,
            )
        if self.problem_type == REGRESSION:
            last = last_layer(self.model_)
            with no_grad():
                last.weight *= plan.deviation
                last.bias.copy_(last.bias * plan.deviation + plan.mean)

    def _decide(self, logits: np.ndarray, values: np.ndarray | None = None) -> list:
        """Predictions, of which the classes are values in the order of the logits, by default their names."""
        found = decisions(self.problem_type, logits)
        if self.problem_type == REGRESSION:
            return found.astype(float).tolist()
        values = np.array(self._classes) if values is None else values
        if self.problem_type == MULTI:
            return [values[of_row == 1].tolist() for of_row in found]
        return values[found].tolist()

    def metrics(self, outputs: np.ndarray, labels: Sequence[Any]) -> Scores:
        """Return the metrics that `label_metrics` describes."""
        return label_metrics(self.problem_type, np.array(self.encode(labels)), outputs)

    def _trivial(self, labels: Sequence[Any]) -> tuple[str, np.ndarray]:
        logits = trivial_logits(self.problem_type, np.array(self.encode(labels)), len(self._classes))
        if self.problem_type == REGRESSION:
            return f"the trivial answer, the mean {logits[0]:.4g}", logits
        chosen = [name for name, logit in zip(self._classes, logits[0]) if logit > 0]
        return f"the trivial answer, always {first_of(chosen) or 'no class'}", logits

    def _peers(self, labels: list, split: str, inputs: Sequence | None) -> dict[str, tuple[str, Any]]:
        peers = {}
        if split == VALIDATION and self._findings.frozen is not None:
            peers["frozen"] = FROZEN, self._findings.frozen
        if self._plan:
            texts, learned = self._plan.columns
            learned = np.array(self.encode(learned))
            try:
                found = tfidf_outputs(texts, learned, self.problem_type, len(self._classes), inputs)
                peers["tfidf"] = "TF-IDF and a linear model", found
            except ValueError as error:
                say(f"TF-IDF is left out: {error}")
        return peers | super()._peers(labels, split, inputs)

    def _report_classes(self, outputs: np.ndarray, labels: list, report: Path) -> None:
        """Write precision, recall and F1 of each class and the confusion matrix, and print the lowest F1."""
        if self.problem_type == REGRESSION:
            return
        pair = self.encode(labels), decisions(self.problem_type, outputs)
        names = self._classes
        options = {"labels": range(len(names)), "zero_division": 0}
        table = classification_report(*pair, target_names=names, digits=3, **options)
        if self.problem_type == SINGLE and len(names) <= MOST_CLASSES:
            matrix = confusion_matrix(*pair, labels=options["labels"])
            shown = tabulate(matrix, names, showindex=names, disable_numparse=[0])
            table += f"\nLabels in rows, predictions in columns:\n\n{shown}\n"
        write_report(report, table)
        say_worst(dict(zip(names, f1_score(*pair, average=None, **options))))

    def prediction_rows(self, outputs: np.ndarray, rows: list[dict], separator: str | None = None) -> list[dict]:
        """Return rows with `prediction`, and `probability_NAME` for each class.

        Args:
            outputs: (N, C) logits of the N rows.
            rows: Their columns.
            separator: What joins the classes of a row, if it has several; None gives lists.
        """
        found = label_columns(outputs, self._classes, self.problem_type, separator)
        return [row | columns for row, columns in zip(rows, found)]

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
