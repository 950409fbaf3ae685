"""What the jobs of fine-tuning share: a model with a new head, one training, predictions, metrics in files, and the record."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset, disable_progress_bars
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from transformers import (
    IntervalStrategy,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)
from transformers.tokenization_utils_base import LARGE_INTEGER
from transformers.utils import logging

from ..checkpoints import MINI_MODEL_PATH
from ..checkpoints.record import origin_of, write_record
from ..checkpoints.saved_model import SavedModel
from ..data.lengths import check_leaves_tokens, check_max_length
from ..files import messages
from ..files.json_files import read_json
from ..files.output import (
    check_file,
    check_is_no_input,
    content_hash,
    list_files,
    listed_files,
    new_folder,
    saving,
    write_json,
)
from ..runs import CheckedCheckpoints, FineTuningArguments, default_learning_rate
from ..runs.arguments import EPOCHS, is_best_if_large
from ..runs.progress import without_bars
from ..runs.resume import RUN, curve_of, lock_run, train_or_resume
from .predictions import write_predictions
from .rows import LabelledRows
from .summary import say_scores

CROSS_VALIDATION = "cross-validation of the last layer"  # a split: the training rows, in turn
OF_CLASSES = ("classification_report_{}.txt", "confusion_matrix_{}.png")  # files, by split
# In which form a model gets its inputs, as lines of scores name it.
FORMS = {"metrics": "this model", "words": "this model, words given", "pipeline": "pipeline of transformers"}
MANY_ROWS = 10_000
# Without validation rows there is no best epoch.
LAST_EPOCH = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


@contextmanager
def training_arguments(
    training: FineTuningArguments | None, options: dict, has_validation: bool = False
) -> Iterator[FineTuningArguments]:
    """Give a copy of the arguments, or those of the options; without `output_dir`, their folder is removed at the end."""
    if training and options:
        raise ValueError(f"give {', '.join(options)} in the training arguments, not beside training=...")
    names = [field.name for field in dataclasses.fields(FineTuningArguments)]
    if unknown := [name for name in options if name not in names]:
        found = f"{unknown[0]}={options[unknown[0]]!r:.80} is no training argument"
        similar = similar_argument(unknown[0], names)
        raise ValueError(f"{found}; {f'did you mean {similar}?' if similar else 'see FineTuningArguments'}")
    with TemporaryDirectory() as folder:
        if training:
            training = copy.copy(training)
            if not has_validation:
                training.eval_strategy, training.load_best_model_at_end = IntervalStrategy.NO, False
            if training.output_dir is None:  # of a pickle: the devices are those of this process
                training = dataclasses.replace(training, output_dir=folder)
        quiet = {} if "output_dir" in options else {"output_dir": folder, "report_to": "none", "save_only_model": True}
        yield training or FineTuningArguments(**({} if has_validation else LAST_EPOCH) | quiet | options)


def similar_argument(name: str, names: Sequence[str]) -> str | None:
    """Return the name of an argument that is written alike, or else contains it, one of the training before others."""
    close = get_close_matches("learning_rate" if name == "lr" else name, names, 1, 0.8)
    longer = sorted((other for other in names if name in other), key=lambda other: "train" not in other)
    return next(iter(close + longer), None)


def all_or_nothing(fit: Callable) -> Callable:
    """Let a `fit` train a new job without what an earlier one has left; what it learns is kept if it succeeds."""

    @wraps(fit)
    def wrapped(job: Job, *columns, **options) -> Job:
        new = type(job)(**job.get_params(deep=False))
        with messages.silence(not job.verbose):
            new._start()
            fit(new, *columns, **options)
        job.__dict__.update(vars(new))
        return job

    return wrapped


def told(method: Callable) -> Callable:
    """Let a method of a job tell nothing if the job is not verbose."""

    @wraps(method)
    def wrapped(job: Job, *arguments, **options) -> Any:
        with messages.silence(not job.verbose):
            return method(job, *arguments, **options)

    return wrapped


class JobTrainer(CheckedCheckpoints):
    """Trainer that predicts in float32 also if it trains in bf16, so that it predicts what the saved model does."""

    use_cpu_amp = property(lambda self: False, lambda self, _: None)  # of transformers 4, beside that of accelerate

    def prediction_step(self, model: Any, *args, **kwargs) -> Any:
        """As Trainer's, without the autocast that accelerate adds to the forward."""
        inner = vars(self.accelerator.unwrap_model(model))
        wrapped = {"forward": inner["forward"]} if "_original_forward" in inner else {}
        inner |= {name: inner["_original_forward"] for name in wrapped}
        try:
            return super().prediction_step(model, *args, **kwargs)
        finally:
            inner |= wrapped


class Job(BaseEstimator, ABC):
    """A model for one job: `fit` trains it, `predict` uses it, `evaluate` measures it, `save` writes it.

    It is an estimator of scikit-learn. The constructor stores its arguments; the first use checks them and loads the tokenizer.
    What was loaded or learned is forgotten when `model` is set to another one. Other parameters count at the next `fit`.

    A job says what a row is (`_row`), how rows become tokens (`_rows`), and what the outputs of the model mean (`_outputs`,
    `_decide`, `metrics`, `prediction_rows`). The columns are those of `fit`: inputs, and labels as the last one.

    Args:
        model: Folder or id on the Hub: of an encoder, or of a model that was trained for this job.
        max_seq_length: Length in tokens of a training. A trained model keeps its own.
        verbose: Tell what `fit`, `evaluate`, `predict` and `save` find; False leaves warnings and errors only.
    """

    auto_class: type[Any]  # of transformers
    kind: str  # of a trained model, as of `SavedModel`
    noun: str
    column_names: tuple[str, ...] = ("texts", "labels")  # of `fit`
    _best_metric: str | None = "f1"  # chooses the best epoch
    _truncated = ""  # a sentence about the rows that were tokenized last; windows truncate nothing
    _begun: str | None = None  # the model to which all of this belongs
    _is_small = False  # whether a step of short texts may have more rows
    problem_type: str | None = None  # of texts, as in the config of a model

    def __init__(self, model: str | Path = MINI_MODEL_PATH, max_seq_length: int = 512, verbose: bool = True):
        self.model, self.max_seq_length, self.verbose = model, max_seq_length, verbose

    def _start(self) -> None:
        """Check the parameters at each use; begin at the first one, and when the model is another one."""
        check_leaves_tokens(self.max_seq_length)
        if not self.verbose:  # for the whole process
            logging.disable_progress_bar()
            disable_progress_bars()
        if self._begun != self._source:
            self._begin()
            self._begun = self._source

    def _begin(self) -> None:
        """Load the tokenizer, and forget what a training has left."""
        self._given = SavedModel(self._source).check()
        self._tokenizer = self._given.load_tokenizer()
        if self._tokenizer.model_max_length > LARGE_INTEGER:
            self._tokenizer.model_max_length = self.max_seq_length
        self._training: FineTuningArguments | None = None
        self._run: dict[str, Any] | None = None  # identity of the training
        self._trainer: Trainer | None = None
        self._network: PreTrainedModel | None = None  # of a pickle
        self._names: list[str] = []  # of the classes
        self._saved: tuple[Path, LabelledRows | None, str | None] | None = None
        self._facts: dict[str, Any] = {}  # of the training, for its record
        self._scores_of: dict[str, dict[str, dict[str, float]]] = {}  # by split: `metrics`, and `trivial` ones
        self._remarks: list[str] = []  # what a reader of the scores must know
        self._learned: Sequence[list] = ()  # columns of the training

    @property
    def _source(self) -> str:
        return str(self.model)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model."""
        self._start()
        return self._tokenizer

    @property
    def _classes(self) -> list[str]:
        """Names of the classes, as in the config of the model; an error if it is not trained."""
        self._start()
        if not (self._names or self._run or self._network):  # answers have no names
            self._read_labels()
        return self._names

    @property
    def classes_(self) -> np.ndarray:
        """Names of the classes.

        Raises:
            NotFittedError: The model is not trained for this job; it is a ValueError and an AttributeError.
        """
        return np.array(self._classes)

    @property
    def model_(self) -> PreTrainedModel:
        """The model that `fit` has trained, or that of the folder.

        Raises:
            NotFittedError: The model is not trained for this job.
        """
        return self._opened().model

    def __sklearn_is_fitted__(self) -> bool:
        try:
            return self._classes is not None
        except (OSError, ValueError):  # also of a model that is missing, of which a call tells it
            return False

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.one_d_array = tags.target_tags.required = True
        tags.input_tags.two_d_array = False
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """The state without what belongs to this process: the trainer, with its optimizer, folders, and the texts.

        It has the weights of a trained model, also if nothing has read them yet.
        """
        state = dict(super().__getstate__())
        if self.__sklearn_is_fitted__():
            _ = self.model_  # which opens the folder
            state |= vars(self) | {"_saved": None, "_learned": ()}
        if trainer := state.get("_trainer"):
            network = copy.copy(trainer.model)
            for name in ("forward", "_original_forward", "_is_accelerate_prepared"):  # which accelerate adds
                vars(network).pop(name, None)
            network = network if network.device.type == "cpu" else copy.deepcopy(network).cpu()
            state |= {"_trainer": None, "_network": network}
        if training := state.get("_training"):
            state["_training"] = training = copy.copy(training)
            training.output_dir = None
            training.use_cpu &= not training.bf16  # which sets it on a CPU; a prediction is in float32
            training.bf16 = False
        return state

    def _opened(self, training: FineTuningArguments | None = None) -> Trainer:
        """The trainer that predicts; the training arguments count if `fit` was not called."""
        _ = self._classes  # an error if it is not trained
        if self._trainer is None:
            with training_arguments(self._training or training, {}) as training:
                self._trainer = self._trainer_for(self._network or self._load_trained(), training)
        return self._trainer

    def _read_labels(self) -> None:
        """Take what the config of a trained model says."""
        if not self._is_trained:
            remedy = "give the folder of one (model_name_or_path), or rows to train on (train_file)"
            raise NotFittedError(f"{self._source} is not a trained {self.noun}; {remedy}")
        self._given.check_head(self.kind)
        self._names = self._given.labels

    @property
    def _is_trained(self) -> bool:
        """Whether the model that was given is one for this job."""
        return self._given.head == self.kind

    def _load_trained(self) -> PreTrainedModel:
        with without_bars():
            return self.auto_class.from_pretrained(self._source, dtype="float32")

    def _load_new(self, **options) -> PreTrainedModel:
        """The model in float32; its head is new unless it has as many outputs as there are classes."""
        if self._names:
            names = dict(enumerate(self._names))
            options |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
        options |= {"dtype": "float32", "ignore_mismatched_sizes": True}
        with without_bars(is_head_new=True):
            model = self.auto_class.from_pretrained(self._source, **options)
        check_max_length(model, self.max_seq_length)
        return model

    @abstractmethod
    def _row(self, *values) -> tuple:
        """A row of inputs, perhaps with a label, as `_rows` takes it; ValueError says what is wrong with it."""

    def _listed(self, *columns, is_labelled: bool = True) -> list[list]:
        """Columns as lists, from lists, arrays, Series or iterators; the index of a Series does not count.

        An iterator can be read once: what reads columns twice reads these.

        Raises:
            ValueError: A column is missing, has no order or no rows, or columns have different lengths.
        """
        names = self.column_names if is_labelled else self.column_names[:-1]
        if len(columns) != len(names):
            raise ValueError(f"{len(columns)} columns; give {' and '.join(names)}")
        for name, column in zip(names, columns):
            if column is None or isinstance(column, str | Mapping | set | frozenset) or hasattr(column, "columns"):
                raise ValueError(f"{name} are a {type(column).__name__}; give a list with an item for each row")
        lists = list(map(list, columns))
        counts = [f"{len(column)} {name}" for name, column in zip(names, lists)]
        if len({*map(len, lists)}) > 1:
            raise ValueError(f"{' and '.join(counts)}; every row needs one of each")
        if not lists[0] and is_labelled:
            raise ValueError(f"{counts[0]}; give at least one row")
        return lists

    def _columns(self, *columns, is_labelled: bool = True) -> list[list]:
        """Columns of `_listed` with checked values; ValueError also says which row has a fault."""
        lists = self._listed(*columns, is_labelled=is_labelled)
        rows = []
        for number, values in enumerate(zip(*lists)):
            try:
                rows.append(self._row(*values))
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from error
        return list(map(list, zip(*rows))) or lists

    @abstractmethod
    def _rows(self, *columns: Any, **options: Any) -> Dataset:
        """Tokens of rows, with labels if the columns hold them; `is_training` says that they are those of a training."""

    def _tokenized(self, *columns: Any, **options: Any) -> Dataset:
        """What `_rows` returns, with a bar if this takes more than a second."""
        is_shown = self.verbose and len(columns[0]) > MANY_ROWS and sys.stderr.isatty()
        with nullcontext() if is_shown else without_bars():
            return self._rows(*columns, **options)

    def _outputs(self, rows: Dataset, logits: Any, inputs: Sequence) -> Any:
        """Outputs for each row: here its logits."""
        return logits

    def _decide(self, outputs: Any) -> list:
        """Predictions: here the outputs themselves."""
        return list(outputs)

    @abstractmethod
    def metrics(self, outputs: Any, labels: Any) -> dict[str, float]:
        """Return the metrics of outputs, given the labels of their rows."""

    @abstractmethod
    def prediction_rows(self, outputs: Any, rows: list[dict]) -> list[dict]:
        """Return rows with columns of their predictions."""

    def _trainer_for(self, model: PreTrainedModel, training: FineTuningArguments, **options) -> Trainer:
        training.disable_tqdm |= not self.verbose
        return JobTrainer(model, training, processing_class=self.tokenizer, **options)

    def _metrics_of_epoch(self, found: Any, rows: Dataset, validation: Sequence) -> dict[str, float]:
        return self.metrics(self._outputs(rows, found.predictions, validation[:-1]), validation[-1])

    def _before_training(self, trainer: Trainer) -> None:
        """Change the new model of a trainer."""

    def _after_training(self) -> None:
        """Change the trained model before it is evaluated."""

    def _fit(
        self, columns: Sequence, validation: Sequence | None, training: FineTuningArguments | None, options: dict
    ) -> None:
        """Train or resume, and report on the validation rows; the arguments are as of `fit`, the columns those of `_columns`."""
        self._learned, validation = columns, validation and self._columns(*validation)
        self.tokenizer.model_max_length = self.max_seq_length
        rows = {"train_dataset": self._tokenized(*columns, is_training=True)}
        self._say_truncated("training")
        if validation:
            rows["eval_dataset"] = held_out = self._tokenized(*validation)
            rows["compute_metrics"] = lambda found: self._metrics_of_epoch(found, held_out, validation)
        run = {"job": self.noun, "model": self._source, "max_seq_length": self.max_seq_length} | self._identity()
        run |= {"classes": self._names or None, "rows": content_hash(columns), "validation": content_hash(validation)}
        with training_arguments(training, options, bool(validation)) as training:
            if self._is_small:
                training.choose_batch(float(np.mean([*map(len, rows["train_dataset"]["input_ids"])])))
            run |= curve_of(training)
            if validation and self._best_metric:
                training.choose_metric(len(held_out), self._best_metric)

            def make_trainer(_: Path | None) -> Trainer:
                set_seed(training.seed)
                model = self._load_new()
                training.choose_learning_rate(model.config, self._learning_rate(model.config))
                training.choose_epochs(self._num_epochs(len(columns[0])))
                trainer = self._trainer_for(model, training, **rows)
                self._before_training(trainer)  # on a resume too: what it measures may be the metrics of the run
                return trainer

            with lock_run(training.output_dir):
                self._trainer = train_or_resume(make_trainer, training, run)
            self._run = json.loads(json.dumps(run))  # as in the folder
            of_classes = f" of {len(self.classes_)} classes" if len(self.classes_) > 1 else ""
            messages.say(f"trained on {len(columns[0]):,} rows{of_classes}")
            self._after_training()
            self._training = training
            self._facts = {"num_rows": len(columns[0]), "is_pair": isinstance(columns[0][0], tuple)}
            if validation:
                *inputs, labels = validation
                self._count_seen(inputs, "validation")
                self._report(self.outputs(*inputs), labels, "validation", Path(training.output_dir), inputs[0])

    def _learning_rate(self, config: PretrainedConfig) -> float:
        """The learning rate of a training, unless the user gives one."""
        return default_learning_rate(config)

    def _num_epochs(self, num_rows: int) -> int:
        """The number of epochs of a training on this number of rows, unless the user gives one."""
        return EPOCHS

    def _identity(self) -> dict[str, Any]:
        """What of a job, besides the training arguments, a resumed run must have too, as plain types."""
        return {}

    def _count_seen(self, inputs: Sequence[list], split: str) -> None:
        """Say how many rows are rows of the training too."""
        learned = set(map(str, zip(*self._learned[:-1])))
        if count := sum(row in learned for row in map(str, zip(*inputs))):
            fact = f"{split}: {count:,} of {len(inputs[0]):,} rows equal a training row, so the scores are too good"
            self._remark(fact, "remove repeated rows")

    def _say_truncated(self, split: str | None = None) -> None:
        """Say how many of the rows that were tokenized last are truncated; those of a training are in its record too."""
        if self._truncated and split:
            self._remark(f"{split}: {self._truncated}", "choose max_seq_length")
        elif self._truncated:
            messages.say(f"{self._truncated}; choose max_seq_length")

    @told
    def outputs(self, *inputs, training: FineTuningArguments | None = None) -> Any:
        """Return what the model says of inputs: logits, or answers.

        Args:
            inputs: Columns as of `fit`, without labels.
            training: Training arguments whose device and batch size are used, if `fit` was not called.

        Raises:
            ValueError: The model is not trained, or a row has a fault.
            FloatingPointError: A prediction is not finite.
        """
        trainer, columns = self._opened(training), self._columns(*inputs, is_labelled=False)
        if not columns[0]:
            return np.zeros((0, len(self._classes)), np.float32)
        rows = self._tokenized(*columns)
        self._say_truncated()
        trainer.compute_metrics = None
        hidden = [name for name in rows.column_names if name.startswith("label")]
        outputs = self._outputs(rows, trainer.predict(rows.remove_columns(hidden)).predictions, columns)
        check_finite(outputs)
        return outputs

    def predict(self, *inputs) -> list:
        """Return the predictions for inputs, the columns of `fit` without labels."""
        return self._decide(self.outputs(*inputs))

    def evaluate(self, *columns) -> dict[str, float]:
        """Return the metrics on rows, the columns of `fit`."""
        _ = self._classes  # which say how labels are read
        lists = self._listed(*columns)
        *_, labels = self._columns(*lists)
        return self.metrics(self.outputs(*lists[:-1]), labels)

    def score(self, *columns) -> float:
        """Return the F1 of `evaluate` on rows, the columns of `fit`."""
        return self.evaluate(*columns)["f1"]

    def _report(self, outputs: Any, labels: list, split: str, folder: Path, inputs: Sequence | None = None) -> None:
        """Print the metrics of a split beside those of simpler answers, and write them to a file of the folder."""
        forms, (trivial, answer) = self._forms(outputs, labels, inputs), self._trivial(labels)
        found, base = forms["metrics"], self.metrics(trivial, labels)
        self._scores_of[split] = scores = {**forms, "trivial": base}
        if self._opened().is_world_process_zero():
            shown, words = {FORMS[kind]: forms[kind] for kind in forms}, self._tfidf(inputs)
            if words is not None and not isinstance(words, str):
                kind = "ridge" if self.problem_type == "regression" else "logistic"
                shown[f"TF-IDF with {kind} regression"] = scores["tfidf"] = self.metrics(words, labels)
            say_scores(f"{split}, {len(labels):,} row{'s' * (len(labels) > 1)}", shown | {f"trivial: {answer}": base})
            if isinstance(words, str):
                messages.say(words)
            folder.mkdir(parents=True, exist_ok=True)
            prefix = "test" if split == "test" else "eval"
            results = folder / f"{prefix}_results.json"
            files = [folder / name.format(split.split()[0]) for name in OF_CLASSES]
            prefixes = {kind: f"{prefix}_{kind}" for kind in scores} | {"metrics": prefix}
            values = {f"{prefixes[kind]}_{name}": value for kind in scores for name, value in scores[kind].items()}
            write_json(results, values)
            self._report_classes(outputs, labels, *files)
        if worse := names_of_worse(found, base):
            decided = self._decide(outputs)
            are_equal = len(decided) > 1 and decided.count(decided[0]) == len(decided)
            equal = f"; all {len(decided):,} predictions are equal" if are_equal else ""
            fact = f"{split}: not better than the trivial answer, {answer}: {', '.join(worse)}{equal}"
            remedy = "for more epochs (num_train_epochs), or from a model of this language and domain"
            self._remark(fact, f"train on more rows, {remedy}")

    def _forms(self, outputs: Any, labels: list, inputs: Sequence | None) -> dict[str, dict[str, float]]:
        """`metrics` of the model as it is served, and those of other forms of the inputs, by a name of `FORMS`."""
        return {"metrics": self.metrics(outputs, labels)}

    @abstractmethod
    def _trivial(self, labels: list) -> tuple[Any, str]:
        """Outputs of the best answer that does not look at the inputs, and its name."""

    def _remark(self, fact: str, remedy: str) -> None:
        """Print a warning; the record of the training, and so the card, has the fact."""
        self._remarks.append(fact)
        messages.warn(f"{fact}; {remedy}")

    def _tfidf(self, inputs: Sequence | None) -> Any:
        """Outputs of TF-IDF for held-out inputs, a sentence that says why there are none, or None for another job."""
        return None

    def _report_classes(self, outputs: Any, labels: list, report: Path, picture: Path) -> None:
        """Write what a job says of each class, print a part of it, and perhaps draw it."""

    @told
    def predict_rows(
        self,
        data: LabelledRows,
        training: FineTuningArguments,
        file: str | None = None,
        overwrite: bool = False,
        **more,
    ) -> None:
        """Predict the test rows of files: a file of predictions, and metrics over the rows with a label that counts.

        A row without a text has an empty prediction. The record of a model that was saved before gets the metrics.

        Args:
            data: Rows of files.
            training: Training arguments; their folder gets the files.
            file: File of the predictions; None takes predictions.csv or predictions.jsonl in the folder.
            overwrite: Replace files; those in the folder of its own training are always replaced.
            more: Further arguments of `prediction_rows`.

        Raises:
            FileExistsError: A file to write exists.
            ValueError: The file cannot hold a value of the rows.
        """
        assert data.test  # the caller asks first whether there are test rows
        folder, (*inputs, labels) = Path(training.output_dir), data.test
        files = [folder / name.format("test") for name in ("{}_results.json", *OF_CLASSES)]
        files += [Path(file)] if file else [folder / f"predictions.{ending}" for ending in ("csv", "jsonl")]
        for each in files:
            check_file(each, overwrite or self._is_own(each.parent))
        outputs = self.outputs(*inputs, training=training)
        self._count_seen(inputs, "test")
        counted = [i for i, label in enumerate(labels or ()) if label is not None]
        if training.should_save and (line := data.not_counted(len(counted))):
            messages.say(line)
        if counted:
            of_counted = outputs[counted] if isinstance(outputs, np.ndarray) else [outputs[i] for i in counted]
            of_labels, of_inputs = ([column[i] for i in counted] for column in (labels, inputs[0]))
            self._report(of_counted, of_labels, "test", folder, of_inputs)
        elif not data.test_faults:
            messages.say("the test rows have no column of labels (label_column), so there are no metrics")
        if counted or not data.test_faults:
            self._write_record()
        if training.should_save:
            answered = [data.test_rows[i] for i in data.test_places]
            rows = self.prediction_rows(outputs, answered, **more)
            write_predictions(file, data.with_empty(rows), folder, overwrite=True)
            if listed_files(folder):
                list_files(folder, [each.name for each in files if each.parent == folder and each.exists()])

    @told
    def save(self, folder: str | Path, data: LabelledRows | None = None, overwrite: bool = False) -> None:
        """Write the model, its tokenizer, and the record of its training, from which its card is made.

        Args:
            folder: Folder: new, empty, or `output_dir` of the training.
            data: Rows of the training, if they are those of files, whose names the record has.
            overwrite: Replace another model that `save` has written, with what its record lists: card, results, predictions.

        Raises:
            FileExistsError: The folder holds another model, or with `overwrite` a file that is not listed.
            OSError: A file cannot be written.
        """
        folder, network, origin = Path(folder), self.model_, origin_of(self._source)
        if self._training is None or hasattr(network, "merge_and_unload"):
            check_is_no_input(folder, [self._source])  # it would lose its record, or the base of the adapter
        is_new = PartialState().is_main_process and not self._is_own(folder)
        with saving(folder), new_folder(folder, overwrite) if is_new else nullcontext(folder) as place:
            self._save_weights(place)
            self._saved = place, data, origin
            self._write_record()
            if is_new:
                list_files(place, [file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()])
        self._saved = folder, data, origin
        PartialState().wait_for_everyone()  # the other processes may read what the first one has written

    def _is_own(self, folder: Path) -> bool:
        """Whether a folder is that of the training of this model."""
        return self._run is not None and (folder / RUN).is_file() and read_json(folder / RUN) == self._run

    def _write_record(self) -> None:
        """Write the record of the training into the folder of the saved model, if there are both."""
        if self._saved is None or self._training is None or not self._training.should_save:
            return
        folder, data, origin = self._saved
        names = data.names if data else dict.fromkeys(("train", "validation", "test"), "rows given in Python")
        hub = data and data.dataset
        of_hub: dict[str, dict] = {hub: {"dataset_id": hub, "config": data.dataset_config}} if data and hub else {}
        names = names | {CROSS_VALIDATION: names["train"]}
        places = {split: {"dataset": names[split], "split": split} for split in self._scores_of}
        scores = [places[split] | found | of_hub.get(names[split], {}) for split, found in self._scores_of.items()]
        rows = {names["train"]: self._facts["num_rows"]}
        more = {"is_pair": self._facts["is_pair"], "remark": " ".join(f"Warning: {fact}." for fact in self._remarks)}
        write_record(folder, self._training, source=origin, rows=rows, datasets=[*of_hub], scores=scores, **more)

    def _save_weights(self, folder: str | Path) -> None:
        with without_bars():
            self._opened().save_model(str(folder))


def names_of_worse(found: Mapping[str, float], trivial: Mapping[str, float]) -> list[str]:
    """Return the metrics that are not better than those of the trivial answer; none if it is right in all rows."""
    if trivial.get("accuracy") == 1 or trivial.get("mse") == 0:
        return []
    gains = {name: (found[name] - value) * (1 if is_best_if_large(name) else -1) for name, value in trivial.items()}
    return [name for name, gain in gains.items() if gain <= 0 and trivial[name] != is_best_if_large(name)]  # 1 or 0


def check_finite(outputs: Any) -> None:
    """Raise FloatingPointError if an output is not finite: an item of an array or of a list of arrays, or a score."""
    if not all(np.isfinite(part["score"] if isinstance(part, dict) else part).all() for part in outputs):
        raise FloatingPointError("a prediction is not finite; the model has diverged, lower the learning_rate")
