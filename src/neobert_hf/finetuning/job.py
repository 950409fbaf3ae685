"""What the jobs of fine-tuning share: a model with a new head, one training, predictions, metrics in files, and the record."""

from __future__ import annotations

import copy
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset, disable_progress_bars
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)
from transformers.tokenization_utils_base import LARGE_INTEGER
from transformers.utils import logging

from ..checkpoints import MINI_MODEL_PATH
from ..checkpoints.record import origin_of
from ..checkpoints.saved_model import SavedModel
from ..data.lengths import DEFAULT_LENGTH, check_leaves_tokens, check_max_length
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
from ..runs import FineTuningArguments
from ..runs.manifests import remove_checkpoints
from ..runs.progress import without_bars
from ..runs.resume import RUN, curve_of, lock_run, train_or_resume
from .decorators import told
from .findings import GIVEN, Findings, Scores, check_finite, names_of_worse
from .plan import Columns, Plan
from .predictions import write_predictions
from .rows import LabelledRows
from .summary import say_scores
from .training import JobTrainer, training_arguments

REPORT = "classification_report_{}.txt"  # by split
MANY_ROWS = 10_000
TRAINING, VALIDATION, TEST = "training", "validation", "test"  # splits


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
    _begun: str | None = None  # the model to which all of this belongs
    problem_type: str | None = None  # of texts, as in the config of a model

    def __init__(
        self,
        model: str | Path = MINI_MODEL_PATH,
        max_seq_length: int = DEFAULT_LENGTH,
        verbose: bool = True,
    ):
        self.model = model
        self.max_seq_length = max_seq_length
        self.verbose = verbose

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
        self._plan: Any = None  # a `Plan` of the fit, unless this is a pickle or a folder
        self._training: FineTuningArguments | None = None
        self._run: dict[str, Any] | None = None  # identity of the training
        self._trainer: Trainer | None = None
        self._network: PreTrainedModel | None = None  # of a pickle
        self._names: list[str] = []  # of the classes
        self._saved: tuple[Path, LabelledRows, str | None] | None = None
        self._findings = Findings()

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
            network = copy.copy(self.model_)  # which opens the folder
            for name in (
                "forward",
                "_original_forward",
                "_is_accelerate_prepared",
            ):  # which accelerate adds
                vars(network).pop(name, None)
            if network.device.type != "cpu":
                network = copy.deepcopy(network).cpu()
            state |= vars(self) | {
                "_saved": None,
                "_plan": None,
                "_trainer": None,
                "_network": network,
            }
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

    def _load_new(self, plan: Plan, **options) -> PreTrainedModel:
        """The model in float32; its head is new unless it has as many outputs as there are classes."""
        if self._names:
            names = dict(enumerate(self._names))
            options |= {
                "id2label": names,
                "label2id": {name: i for i, name in names.items()},
            }
        with without_bars(is_head_new=True):
            model = self.auto_class.from_pretrained(
                self._source, dtype="float32", ignore_mismatched_sizes=True, **options
            )
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
        for name, column in zip(names, columns, strict=True):
            if column is None or isinstance(column, str | Mapping | Set) or hasattr(column, "columns"):
                raise ValueError(f"{name} are a {type(column).__name__}; give a list with an item for each row")
        lists = list(map(list, columns))
        counts = " and ".join(f"{len(column)} {name}" for name, column in zip(names, lists))
        if len(set(map(len, lists))) > 1:
            raise ValueError(f"{counts}; every row needs one of each")
        if is_labelled and not lists[0]:
            raise ValueError(f"{counts}; give at least one row")
        return lists

    def _columns(self, *columns, is_labelled: bool = True) -> list[list]:
        """Columns of `_listed` with checked values; ValueError also says which row has a fault."""
        lists = self._listed(*columns, is_labelled=is_labelled)
        rows = []
        for values in zip(*lists):
            try:
                rows.append(self._row(*values))
            except ValueError as error:
                raise ValueError(f"row {len(rows)}: {error}") from error
        return list(map(list, zip(*rows))) or lists

    @abstractmethod
    def _rows(self, *columns: Any, **options: Any) -> Dataset:
        """Tokens of rows, with labels if the columns hold them; the option is `split`, which a prediction has not."""

    def _tokenized(self, *columns, **options) -> Dataset:
        """What `_rows` returns, with a bar if this takes more than a second."""
        is_shown = self.verbose and len(columns[0]) > MANY_ROWS and sys.stderr.isatty()
        with nullcontext() if is_shown else without_bars():
            return self._rows(*columns, **options)

    def _outputs(self, rows: Dataset, logits: Any, inputs: Columns) -> Any:
        """Outputs for each row: here its logits."""
        return logits

    def _decide(self, outputs: Any) -> list:
        """Predictions: here the outputs themselves."""
        return list(outputs)

    @abstractmethod
    def metrics(self, outputs: Any, labels: Any) -> Scores:
        """Return the metrics of outputs, given the labels of their rows."""

    @abstractmethod
    def prediction_rows(self, outputs: Any, rows: list[dict]) -> list[dict]:
        """Return rows with columns of their predictions."""

    def _trainer_for(self, model: PreTrainedModel, training: FineTuningArguments, **options) -> Trainer:
        training.disable_tqdm |= not self.verbose
        return JobTrainer(model, training, processing_class=self.tokenizer, **options)

    def _metrics_of_epoch(self, plan: Plan, found: Any, rows: Dataset) -> Scores:
        assert plan.validation
        *inputs, labels = plan.validation
        return self.metrics(self._outputs(rows, found.predictions, inputs), labels)

    def _before_training(self, plan: Plan, trainer: Trainer) -> None:
        """Change the new model of a trainer."""

    def _after_training(self, plan: Plan) -> None:
        """Change the trained model before it is evaluated."""

    def _fit(
        self,
        plan: Plan,
        training: FineTuningArguments | None,
        options: dict[str, Any],
    ) -> None:
        """Train or resume by a plan, and report on the validation rows; the other arguments are those of `fit`."""
        self._plan = plan
        num_rows = len(plan.columns[0])
        self._findings = Findings(num_rows, is_pair=isinstance(plan.columns[0][0], tuple))
        self.tokenizer.model_max_length = self.max_seq_length
        rows = {"train_dataset": self._tokenized(*plan.columns, split=TRAINING)}
        if plan.validation:
            rows["eval_dataset"] = held_out = self._tokenized(*plan.validation, split=VALIDATION)
            rows["compute_metrics"] = lambda found: self._metrics_of_epoch(plan, found, held_out)
        with training_arguments(training, options, bool(plan.validation)) as training:
            self._train(plan, training, rows)
            of_classes = f" of {len(self._names)} classes" if len(self._names) > 1 else ""
            messages.say(f"trained on {num_rows:,} rows{of_classes}")
            self._after_training(plan)
            self._training = training
            if plan.validation:
                *inputs, labels = plan.validation
                self._count_seen(inputs, VALIDATION)
                self._report(
                    self.outputs(*inputs),
                    labels,
                    VALIDATION,
                    Path(training.output_dir),
                    inputs[0],
                )

    def _train(self, plan: Plan, training: FineTuningArguments, rows: dict[str, Any]) -> None:
        """Train or resume; the rows are arguments of the trainer."""
        if plan.has_short_steps:
            lengths = list(map(len, rows["train_dataset"]["input_ids"]))
            training.choose_batch(float(np.mean(lengths)))
        if (
            plan.is_crossed and not training.has_limit
        ):  # few rows, which are trained again sooner than a checkpoint is written
            training.save_strategy = "no"
        run = {
            "job": self.noun,
            "model": self._source,
            "max_seq_length": self.max_seq_length,
            **plan.identity,
            "classes": self._names or None,
            "rows": content_hash(plan.columns),
            "validation": content_hash(plan.validation),
            **curve_of(training),
        }
        if plan.validation and plan.best_metric:
            training.choose_metric(len(rows["eval_dataset"]), plan.best_metric)

        def make_trainer(_: Path | None) -> Trainer:
            set_seed(training.seed)
            model = self._load_new(plan)
            training.choose_learning_rate(model.config, plan.learning_rate)
            training.choose_epochs(plan.epochs)
            trainer = self._trainer_for(model, training, **rows)
            self._before_training(plan, trainer)  # on a resume too: what it measures may be the metrics of the run
            return trainer

        with lock_run(training.output_dir):
            self._trainer = train_or_resume(make_trainer, training, run)
        self._run = json.loads(json.dumps(run))  # as in the folder

    def _count_seen(self, inputs: Columns, split: str) -> None:
        """Say how many rows are rows of the training too."""
        if not self._plan:
            return
        learned = set(map(str, zip(*self._plan.columns[:-1])))
        count = sum(row in learned for row in map(str, zip(*inputs)))
        if count:
            fact = f"{split}: {count:,} of {len(inputs[0]):,} rows equal a training row, so the scores are too good"
            self._findings.warn(fact, "remove repeated rows")

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
        trainer = self._opened(training)
        columns = self._columns(*inputs, is_labelled=False)
        if not columns[0]:
            return np.zeros((0, len(self._classes)), np.float32)
        rows = self._tokenized(*columns)
        trainer.compute_metrics = None
        hidden = [name for name in rows.column_names if name.startswith("label")]
        found = trainer.predict(rows.remove_columns(hidden))
        outputs = self._outputs(rows, found.predictions, columns)
        check_finite(outputs)
        return outputs

    def predict(self, *inputs) -> list:
        """Return the predictions for inputs, the columns of `fit` without labels."""
        return self._decide(self.outputs(*inputs))

    def evaluate(self, *columns) -> Scores:
        """Return the metrics on rows, the columns of `fit`."""
        return self.metrics(*self._measured(*columns))

    def _measured(self, *columns) -> tuple[Any, list]:
        """Outputs for rows, and their checked labels."""
        _ = self._classes  # which say how labels are read
        lists = self._listed(*columns)
        *_, labels = self._columns(*lists)
        return self.outputs(*lists[:-1]), labels

    def score(self, *columns) -> float:
        """Return the F1 of `evaluate` on rows, the columns of `fit`."""
        return self.evaluate(*columns)["f1"]

    def _served_metrics(self, outputs: Any, labels: list, inputs: Any) -> Scores:
        """Metrics of the model as it is served."""
        return self.metrics(outputs, labels)

    @abstractmethod
    def _trivial(self, labels: list) -> tuple[str, Any]:
        """Name and outputs of the best answer that does not look at the inputs."""

    def _peers(self, labels: list, split: str, inputs: Sequence | None) -> dict[str, tuple[str, Any]]:
        """Names and outputs of simpler answers for the rows of a split, by their key in the record."""
        return {"trivial": self._trivial(labels)}

    def _report_classes(self, outputs: Any, labels: list, report: Path) -> None:
        """Write what a job says of each class, and print the lowest ones."""

    def _report(
        self,
        outputs: Any,
        labels: list,
        split: str,
        folder: Path,
        inputs: Sequence | None = None,
        title: str = "this model",
    ) -> None:
        """Print the metrics of a split beside those of simpler answers, and write them to a file of the folder."""
        scores = {"metrics": self._served_metrics(outputs, labels, inputs)}
        lines = {title: scores["metrics"]}
        lost = []
        for name, (peer, found) in self._peers(labels, split, inputs).items():
            lines[peer] = scores[name] = self.metrics(found, labels)
            worse = names_of_worse(scores["metrics"], scores[name], name == "trivial")
            if worse:
                lost.append(f"{peer}: {', '.join(worse)}")
        self._findings.scores[split] = scores
        if self._opened().is_world_process_zero():
            num_rows = f"{len(labels):,} row{'s' * (len(labels) > 1)}"
            say_scores(f"{split}, {num_rows}", lines)
            self._write_scores(scores, split, folder, outputs, labels)
        if lost:
            fact = f"{split}: not better than {'; nor than '.join(lost)}"
            decided = self._decide(outputs)
            if len(decided) > 1 and decided.count(decided[0]) == len(decided):
                fact += f"; all {len(decided):,} predictions are equal"
            remedy = "for more epochs (num_train_epochs), or from a model of this language and domain"
            self._findings.warn(fact, f"train on more rows, {remedy}")

    def _write_scores(self, scores: dict[str, Scores], split: str, folder: Path, outputs: Any, labels: list) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = "test" if split == TEST else "eval"
        values = {}
        for form, of_form in scores.items():
            start = prefix if form == "metrics" else f"{prefix}_{form}"
            values |= {f"{start}_{name}": value for name, value in of_form.items()}
        results = folder / f"{prefix}_results.json"
        write_json(results, values)
        self._report_classes(outputs, labels, folder / REPORT.format(split.split()[0]))

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
        folder = Path(training.output_dir)
        *inputs, labels = data.test
        files = [folder / name.format("test") for name in ("{}_results.json", REPORT)]
        files += [Path(file)] if file else [folder / f"predictions.{ending}" for ending in ("csv", "jsonl")]
        _ = self._classes  # an error if it is not trained
        for each in files:
            check_file(each, overwrite or self._is_own(each.parent))
        outputs = self.outputs(*inputs, training=training)
        self._count_seen(inputs, TEST)
        counted = [i for i, label in enumerate(labels or ()) if label is not None]
        if training.should_save and (line := data.not_counted(len(counted))):
            messages.say(line)
        if counted:
            of_counted = [outputs[i] for i in counted]
            if isinstance(outputs, np.ndarray):
                of_counted = outputs[counted]
            of_labels, of_inputs = ([column[i] for i in counted] for column in (labels, inputs[0]))
            self._report(of_counted, of_labels, TEST, folder, of_inputs)
        elif not data.test_faults:
            messages.say("no test row has a label in its column (label_column), so there are no metrics")
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
        folder = Path(folder)
        origin = origin_of(self._source)
        if hasattr(self.model_, "merge_and_unload") or self._training is None:
            check_is_no_input(folder, [self._source])  # it would lose its record, or the base of the adapter
        is_new = PartialState().is_main_process and not self._is_own(folder)
        with saving(folder), new_folder(folder, overwrite) if is_new else nullcontext(folder) as place:
            self._save_weights(place)
            self._saved = place, data or GIVEN, origin
            self._write_record()
            if is_new:
                files = [file for file in place.rglob("*") if file.is_file()]
                list_files(place, [file.relative_to(place).as_posix() for file in files])
            elif self._training and not self._training.has_limit and PartialState().is_main_process:
                remove_checkpoints(folder)
        self._saved = folder, data or GIVEN, origin
        PartialState().wait_for_everyone()  # the other processes may read what the first one has written

    def _is_own(self, folder: Path) -> bool:
        """Whether a folder is that of the training of this model."""
        return self._run is not None and (folder / RUN).is_file() and read_json(folder / RUN) == self._run

    def _write_record(self) -> None:
        """Write the record of the training into the folder of the saved model, if there are both."""
        if self._saved and self._training and self._training.should_save:
            folder, data, origin = self._saved
            self._findings.write(folder, self._training, origin, data)

    def _save_weights(self, folder: str | Path) -> None:
        with without_bars():
            self._opened().save_model(str(folder))
