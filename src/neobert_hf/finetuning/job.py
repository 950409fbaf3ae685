"""What the jobs of fine-tuning share: a model with a new head, one training, predictions, metrics in files, and the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoConfig, PreTrainedModel, Trainer, set_seed
from transformers.tokenization_utils_base import LARGE_INTEGER

from ..files.texts import check_leaves_tokens, check_max_length
from ..files.trust import load_tokenizer
from ..files.writing import content_hash, write_json
from ..runs import (
    MINI_MODEL_PATH,
    CheckedCheckpoints,
    FineTuningArguments,
    default_learning_rate,
    lock_run,
    train_or_resume,
    write_record,
)
from .predictions import write_predictions
from .rows import LabelledRows

# Without validation rows there is no best epoch.
LAST_EPOCH = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


@contextmanager
def training_arguments(
    training: FineTuningArguments | None,
    options: dict[str, Any],
    has_validation: bool = False,
    kind: type[FineTuningArguments] = FineTuningArguments,
) -> Iterator[FineTuningArguments]:
    """Give the arguments, or those of the options; without `output_dir`, their folder is removed at the end."""
    if training is not None:
        yield training
        return
    options = options if has_validation else LAST_EPOCH | options
    with TemporaryDirectory() as folder:
        quiet = {} if "output_dir" in options else {"output_dir": folder, "report_to": "none", "save_only_model": True}
        yield kind(**quiet | options)


class Job:
    """A model for one job: `fit` trains it, `predict` uses it, `evaluate` measures it, `save` writes it.

    Args:
        model: Folder or id on the Hub: of an encoder, or of a model that was trained for this job.
        max_seq_length: Length in tokens of a training. A trained model keeps its own.
    """

    auto_class: type  # of transformers
    noun: str

    def __init__(self, model: str | Path = MINI_MODEL_PATH, max_seq_length: int = 512):
        check_leaves_tokens(max_seq_length)
        self.source, self.max_seq_length = str(model), max_seq_length
        self.tokenizer = load_tokenizer(self.source)
        if self.tokenizer.model_max_length > LARGE_INTEGER:
            self.tokenizer.model_max_length = max_seq_length
        self.num_rows = 0  # of the training
        self.scores: dict[str, dict[str, float]] = {}  # metrics by split
        self.example: Any = None  # the first input of the validation
        self.adapter: Any = None  # LoRA
        self._names: list[str] | None = None
        self._training: FineTuningArguments | None = None
        self._trainer: Trainer | None = None

    @property
    def classes(self) -> list[str]:
        """Names of the classes.

        Raises:
            ValueError: The model is not trained for this job.
        """
        if self._names is None:
            self._read_labels()
        return self._names

    @property
    def model(self) -> PreTrainedModel:
        """The trained model."""
        return self._trainer.model if self._trainer else self._load_trained()

    def _read_labels(self) -> None:
        """Take what the config of a trained model says."""
        config = AutoConfig.from_pretrained(self.source)
        ending = self.auto_class.__name__.removeprefix("AutoModel")
        if not any(name.endswith(ending) for name in config.architectures or ()):
            raise ValueError(
                f"{self.source} is not a trained {self.noun}; give the folder of one by --model_name_or_path, or rows to train "
                "by --train_file"
            )
        self._names = [config.id2label[i] for i in range(config.num_labels)]

    def _load_trained(self) -> PreTrainedModel:
        self._read_labels()
        return self.auto_class.from_pretrained(self.source, dtype="float32")

    def _load_new(self, **options) -> PreTrainedModel:
        """The model in float32; its head is new unless it has as many outputs as there are classes."""
        if self._names is not None:
            names = dict(enumerate(self._names))
            options |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
        model = self.auto_class.from_pretrained(self.source, dtype="float32", ignore_mismatched_sizes=True, **options)
        check_max_length(model, self.max_seq_length)
        return model

    def _train(
        self,
        training: FineTuningArguments,
        load: Callable[[], PreTrainedModel],
        rows: dict[str, Dataset],
        identity: dict,
        metric: str | None = "f1",
        **options,
    ) -> None:
        """Train, or resume.

        Args:
            training: Training arguments.
            load: Returns the model to train.
            rows: Tokens of `train`, and of `validation` if there are such rows.
            identity: Data of the run; a resume with others is refused.
            metric: The metric that chooses the best epoch; None leaves the choice to the arguments.
            options: Other arguments of Trainer.
        """
        if "validation" in rows and metric:
            training.choose_metric(len(rows["validation"]), metric)
        data = {"train_dataset": rows["train"], "eval_dataset": rows.get("validation")}

        def make_trainer(_: Path | None) -> Trainer:
            set_seed(training.seed)
            model = load()
            rate = default_learning_rate(model.config)
            training.choose_learning_rate(model.config, 10 * rate if self.adapter else rate)
            return CheckedCheckpoints(model, training, processing_class=self.tokenizer, **data, **options)

        run = {"job": self.noun, "model": self.source, "classes": self._names, "max_seq_length": self.max_seq_length}
        run |= {"seed": training.seed, "adapter": bool(self.adapter), "rows": content_hash(identity)}
        with lock_run(training.output_dir):
            self._trainer = train_or_resume(make_trainer, training, run)
        self._training = training

    def _predict(self, rows: Dataset, training: FineTuningArguments | None = None, **options) -> Any:
        """What the model says of rows of tokens, on the device and in the batches of the training arguments."""
        if self._trainer is None:
            model = self._load_trained()
            with training_arguments(training, {}) as training:
                options |= {"eval_dataset": rows, "processing_class": self.tokenizer}
                self._trainer = Trainer(model, training, **options)
        self._trainer.compute_metrics = None
        return self._trainer.predict(rows).predictions

    def outputs(self, *inputs, training: FineTuningArguments | None = None) -> Any:
        """What the model says of the inputs of `fit`: logits, or answers."""
        raise NotImplementedError

    def metrics(self, outputs: Any, labels: list) -> dict[str, float]:
        """The metrics of outputs, given the labels as in `fit`."""
        raise NotImplementedError

    def prediction_rows(self, outputs: Any, rows: list[dict]) -> list[dict]:
        """The rows with what is predicted."""
        raise NotImplementedError

    def evaluate(self, *columns, training: FineTuningArguments | None = None) -> dict[str, float]:
        """Return the metrics of the model on rows; the arguments are the first ones of `fit`."""
        return self.metrics(self.outputs(*columns[:-1], training=training), columns[-1])

    def _report(self, outputs: Any, labels: list | None, split: str, folder: str | Path) -> None:
        """Print the metrics of a split, and write them to a file of the folder."""
        if labels is None:
            print(f"the {split} rows have no labels, so there are no metrics", flush=True)
            return
        self.scores[split] = found = self.metrics(outputs, labels)
        if self._trainer is None or self._trainer.is_world_process_zero():
            print(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()), flush=True)
            prefix = {"validation": "eval"}.get(split, split)
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_json(Path(folder, f"{prefix}_results.json"), {f"{prefix}_{name}": found[name] for name in found})
            self._report_classes(outputs, labels, split, Path(folder))

    def _report_classes(self, outputs: Any, labels: list, split: str, folder: Path) -> None:
        """Print what a job says of each class."""

    def predict_rows(
        self, data: LabelledRows, training: FineTuningArguments, file: str | None = None, **options
    ) -> None:
        """Predict the test rows of files: a file of predictions, and metrics if they have labels.

        Args:
            data: Rows of files.
            training: Training arguments; their folder gets the files.
            file: File of the predictions; None takes predictions.csv or predictions.jsonl in the folder.
            options: Further arguments of `prediction_rows`.
        """
        outputs = self.outputs(*data.test[:-1], training=training)
        self._report(outputs, data.test[-1], "test", training.output_dir)
        if training.should_save:
            write_predictions(file, self.prediction_rows(outputs, data.test_rows, **options), training.output_dir)

    def save(self, folder: str | Path, data: LabelledRows | None = None) -> None:
        """Write the model, its tokenizer, and the record of its training, from which its card is made.

        Args:
            folder: Folder.
            data: Rows of the training, if they are those of files, whose names the record has.
        """
        self._save_weights(folder)
        training = self._training
        if training is None or not training.should_save:
            return
        names = data.names if data else dict.fromkeys(("train", "validation", "test"), "rows given in Python")
        hub_id = data and data.dataset
        scores = [
            {"dataset": names[split], "dataset_id": hub_id if names[split] == hub_id else None, "split": split, "metrics": found}
            for split, found in self.scores.items()
        ]
        more = {"datasets": [hub_id] if hub_id else [], "scores": scores, "example": self.example}
        write_record(folder, training, source=self.source, rows={names["train"]: self.num_rows}, **more)

    def _save_weights(self, folder: str | Path) -> None:
        if self._trainer:
            self._trainer.save_model(str(folder))
        else:
            self._load_trained().save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
