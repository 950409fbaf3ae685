"""Classify texts with a few examples of each class, in seconds: contrastive training, then a logistic regression.

    python examples/finetune_few_shot.py --train_file examples.csv --output_dir runs/few
    python examples/finetune_few_shot.py --train_file train.csv --examples_per_class 16 --test_file dev.csv \\
        --output_dir runs/few --model_name_or_path chandar-lab/NeoBERT
    python examples/finetune_few_shot.py --test_file new.csv --model_name_or_path runs/few --output_dir runs/predictions

In Python: `FewShotClassifier().fit(texts, labels)`. The folder is a sentence-transformers model whose vectors are the logits
of the classes: `SentenceTransformer("runs/few", trust_remote_code=True).encode(texts)`; config.json has the names of the classes.

Source: SetFit, arXiv 2209.11055. The training is sentence-transformers' own, on triplets instead of pairs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.losses import BatchAllTripletLoss
from sklearn.exceptions import NotFittedError
from transformers.hf_argparser import HfArg

from neobert_hf.embeddings import open_embedding_model
from neobert_hf.embeddings.models import HEAD, has_head, longest_input, tokens_lost
from neobert_hf.files import content_hash
from neobert_hf.files.messages import say
from neobert_hf.files.texts import Truncation, beginning, fact_of_truncated
from neobert_hf.finetuning import Classifier, LabelledTextArguments, read_labelled_texts
from neobert_hf.finetuning.head import choose_strength, fit_linear
from neobert_hf.finetuning.job import all_or_nothing, check_finite, told, training_arguments
from neobert_hf.finetuning.rows import given_names
from neobert_hf.finetuning.texts import SINGLE, text_classes
from neobert_hf.hub import write_card
from neobert_hf.runs import (
    MINI_MODEL_PATH,
    CheckedCheckpoints,
    FineTuningArguments,
    curve_of,
    lock_run,
    run_script,
    train_or_resume,
)


@dataclass
class FewShotArguments(LabelledTextArguments):
    """Model and data."""

    model_name_or_path: str = HfArg(default=MINI_MODEL_PATH, help="An embedding model: folder or id on the Hub.")
    examples_per_class: int = HfArg(default=None, help="Examples drawn of each class. Default: all rows.")
    problem_type: Literal["single_label_classification"] = HfArg(default=SINGLE, help="A row has one class.")
    max_seq_length: int = HfArg(default=128, help="Length in tokens at which texts are truncated.")


@dataclass
class FewShotTrainingArguments(FineTuningArguments, SentenceTransformerTrainingArguments):
    """Training arguments: some steps, whose number depends on the examples, without checkpoints."""

    max_steps: int = HfArg(default=0, help="Steps; 0 chooses 20 to 100 by the pairs, with -1 num_train_epochs counts.")
    num_train_epochs: float = 3
    warmup_steps: float = 0.1
    logging_steps: float = 0.05
    eval_strategy: str = "no"
    save_strategy: str = "no"
    load_best_model_at_end: bool = False
    batch_sampler: str = "group_by_label"


class FewShotTrainer(CheckedCheckpoints, SentenceTransformerTrainer):
    """sentence-transformers' trainer, with checkpoints from which a run resumes."""


class FewShotClassifier(Classifier):
    """Texts get one of several classes, of which a few examples are known.

    The embedding model learns until texts of one class are closer to one another than to those of other classes. A logistic
    regression on its vectors is then its last layer, so that `encode` returns the logits of the classes.

    Args:
        model: Folder or id on the Hub: of a NeoBERT, of an embedding model, or of a model that `save` wrote.
        max_seq_length: Length in tokens at which the texts of a training are cut.
        verbose: Tell what `fit`, `evaluate`, `predict` and `save` find; False leaves warnings and errors only.
        truncation: As of `Classifier`.
    """

    def __init__(
        self,
        model: str | Path = MINI_MODEL_PATH,
        max_seq_length: int = 128,
        verbose: bool = True,
        truncation: Truncation = "warn",
    ):
        super().__init__(model, max_seq_length, verbose=verbose, truncation=truncation)

    def _begin(self) -> None:
        super()._begin()
        self._encoder = self._load_new()

    def _load_new(self, **_) -> SentenceTransformer:
        return open_embedding_model(self._source, model_kwargs={"dtype": torch.float32})

    @property
    def model_(self) -> SentenceTransformer:
        """The embedding model; after `fit` with the layers of the classes."""
        self._start()
        return self._encoder

    def _read_labels(self) -> None:
        if not has_head(self._encoder):
            raise NotFittedError(
                f"{self._source} has no classes; give the folder of a trained model, or rows to train on"
            )
        names = self._encoder[0].config.id2label
        self.problem_type, self._names = SINGLE, [names[i] for i in range(len(names))]

    def _columns(self, *columns, is_labelled: bool = True) -> list[list]:
        texts, *labels = super()._columns(*columns, is_labelled=is_labelled)
        if pairs := [f"row {i}" for i, text in enumerate(texts) if isinstance(text, tuple)]:
            raise ValueError(f"{pairs[0]}: a pair of texts has no vector of its own; give one text (text_columns)")
        longest = max(self.max_seq_length, self._encoder.max_seq_length or 0)
        return [[beginning(text, self.tokenizer, longest) for text in texts], *labels]

    @all_or_nothing
    def fit(
        self,
        texts: Sequence[str],
        labels: Sequence[Any],
        validation: tuple[Sequence[str], Sequence[Any]] | None = None,
        training: FewShotTrainingArguments | None = None,
        *,
        classes: Sequence[str] | None = None,
        examples_per_class: int | None = None,
        **options,
    ) -> FewShotClassifier:
        """Train on examples.

        Args:
            texts: Texts.
            labels: Label of each text.
            validation: Other texts and labels; the metrics on them are printed at the end.
            training: As of `Classifier.fit`, and `options` too.
            classes: Names of the classes in the order of the logits; by default the sorted labels.
            examples_per_class: Number of examples that are drawn of each class; None takes all.

        Raises:
            ValueError: Fewer than two classes have two examples, a class has none, or a row has a fault, such as a pair of texts.
        """
        self.problem_type = SINGLE
        texts, labels = self._columns(texts, labels)
        held_out = validation and self._columns(*validation)
        self._names = given_names(classes) or text_classes(texts, labels)
        if missing := [name for name in self._names if name not in labels]:
            raise ValueError(f"the class {missing[0]!r} has no example; give one, or leave out the class")
        numbers = self.encode(labels)
        if held_out:
            self.encode(held_out[1])  # an unknown class is an error before the training
        model = self._encoder
        with training_arguments(training, options, kind=FewShotTrainingArguments) as training:
            chosen = draw_examples(numbers, examples_per_class, training.seed)
            examples = {"text": [texts[i] for i in chosen], "label": [numbers[i] for i in chosen]}
            say(f"{len(chosen)} examples of {len(self._names)} classes: {', '.join(self._names)}")
            model.max_seq_length = self.tokenizer.model_max_length = self.max_seq_length
            for column in [*(held_out or ())[:1], examples["text"]]:  # with truncation="error" before the training
                self._count_truncated(column)
            self._say_truncated("training")
            # otherwise the trainer collects texts of the examples, with a progress bar
            model.model_card_data.widget = [{}]
            if has_head(model):  # of an earlier training
                del model[-2:]
            # the training brings the examples of a class together, so that they say nothing about C any more
            strength = choose_strength(unit_vectors(model, examples["text"]), np.array(examples["label"]), SINGLE)
            if training.max_steps == 0:
                training.max_steps = steps_for(examples["label"], training.train_batch_size)
            training.disable_tqdm |= not self.verbose
            config = model[0].config
            # a few steps need large ones; larger ones than this make all-MiniLM-L6-v2 worse at many classes
            training.choose_learning_rate(config, 2e-4 if config.hidden_size <= 256 else 5e-5)

            def make_trainer(_: Path | None) -> FewShotTrainer:
                rows = Dataset.from_dict(examples)
                return FewShotTrainer(model, training, train_dataset=rows, loss=BatchAllTripletLoss(model))

            run = {"job": "few examples", "model": self._source, "classes": self._names, "rows": content_hash(examples)}
            run |= {"max_seq_length": self.max_seq_length} | curve_of(training)
            with lock_run(training.output_dir):
                trainer = train_or_resume(make_trainer, training, run)
            trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # bf16 is for the training
            self._run = json.loads(json.dumps(run))
            add_head(model, examples["text"], examples["label"], self._names, strength)
            self._end_fit([*examples.values()], held_out, training)
        return self

    def _count_truncated(self, texts: Sequence[str]) -> None:
        longest = longest_input(self._encoder) or sys.maxsize
        lost = tokens_lost(self._encoder.tokenizer, longest, texts)
        self._truncated = fact_of_truncated(lost, longest, self.truncation)

    def _tfidf(self, inputs: Sequence | None) -> None:
        """None: a few examples of each class say little about words."""

    @told
    def outputs(self, texts: Sequence[str], training: FineTuningArguments | None = None) -> np.ndarray:
        """Return (N, C) logits of N texts.

        Raises:
            ValueError: The model is not trained, or a row has a fault.
        """
        _ = self.classes_  # an error if it is not trained
        (texts,) = self._columns(texts, is_labelled=False)
        if not texts:
            return np.zeros((0, len(self.classes_)), np.float32)
        self._count_truncated(texts)
        self._say_truncated()
        batch_size = (training or self._training or FewShotTrainingArguments).per_device_eval_batch_size
        logits = self._encoder.encode(texts, batch_size=batch_size)
        check_finite(logits)
        return logits

    def _save_weights(self, folder: str | Path) -> None:
        _ = self.classes_  # an error if it is not trained
        if PartialState().is_main_process:  # without a card, which would be of an embedding model
            self._encoder.save_pretrained(str(folder), create_model_card=False)


def draw_examples(labels: Sequence[int], per_class: int | None, seed: int) -> list[int]:
    """Return the numbers of examples of each class, drawn at random, or of all that it has.

    Args:
        labels: Number of the class of each row.
        per_class: Number of examples of each class; None returns all rows.
        seed: Seed of the draw.

    Raises:
        ValueError: Fewer than two classes have two examples, which could be compared.
    """
    order, labels = np.random.default_rng(seed).permutation(len(labels)), np.array(labels)
    drawn = {label: order[labels[order] == label][:per_class] for label in np.unique(labels)}
    if (per_class or 2) < 2 or sum(len(of_class) > 1 for of_class in drawn.values()) < 2:
        remedy = "give more rows, or more examples_per_class"
        raise ValueError(f"fewer than two classes have two examples to compare; {remedy}")
    return sorted(int(i) for of_class in drawn.values() for i in of_class)


def steps_for(labels: Sequence[int], batch_size: int) -> int:
    """Return a number of steps, from 20 to 100, for examples of these classes: one for each batch of pairs of one class."""
    counts = np.unique(labels, return_counts=True)[1]
    return int(np.clip((counts * (counts - 1) / 2).sum() / batch_size, 20, 100))


def add_head(
    model: SentenceTransformer,
    texts: Sequence[str],
    labels: Sequence[int],
    names: Sequence[str],
    strength: float | None = None,
) -> None:
    """Append a logistic regression to an embedding model, as a linear layer. `encode` then returns the logits of the classes.

    The model also gets a layer before it that scales vectors to length 1, and the names of the classes in its config. It loses
    the layers of an earlier call, and its `truncate_dim`, which would cut the logits.

    Args:
        model: The model.
        texts: Examples.
        labels: Number of the class of each example; every class has one.
        names: Names of the classes.
        strength: C of the regression; None chooses it by cross-validation on the examples.
    """
    model.truncate_dim = None
    if has_head(model):
        del model[-2:]
    weight, bias = fit_linear(unit_vectors(model, texts), np.array(labels), len(names), SINGLE, strength)
    model.append(Normalize())
    layer = Dense(*weight.T.shape, activation_function=torch.nn.Identity(), init_weight=weight, init_bias=bias)
    model.add_module(HEAD, layer.to(model.device))
    config = model[0].config
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}


def unit_vectors(model: SentenceTransformer, texts: Sequence[str]) -> np.ndarray:
    """Return the vectors (N, D) of N texts, of length 1."""
    return model.encode(list(texts), normalize_embeddings=True)


def train(arguments: FewShotArguments, training: FewShotTrainingArguments):
    """Train, if there are training rows; evaluate on validation and test rows, and predict the labels of the latter."""
    model, length = arguments.model_name_or_path, arguments.max_seq_length
    classifier = FewShotClassifier(model, length, truncation=arguments.truncation)
    rows = read_labelled_texts(arguments, training.seed, classifier)
    if arguments.train_file and not arguments.validation_file:  # every example counts
        rows.train, rows.validation = [a + b for a, b in zip(rows.train, rows.validation)], None
    if rows.train:
        options = {"classes": rows.classes, "examples_per_class": arguments.examples_per_class}
        classifier.fit(*rows.train, rows.validation, training, **options)
        classifier.save(training.output_dir, rows)
    if rows.test:
        classifier.predict_rows(rows, training, arguments.predictions_file)
    if rows.train and training.should_save:
        write_card(training.output_dir, example=rows.example)


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
