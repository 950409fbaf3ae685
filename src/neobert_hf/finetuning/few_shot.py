"""Classification with few examples: contrastive training of an embedding model, and a logistic regression on its vectors.

Source: SetFit, arXiv 2209.11055. The training is sentence-transformers' own, on triplets instead of pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.losses import BatchAllTripletLoss
from sklearn.linear_model import LogisticRegression
from transformers.hf_argparser import HfArg

from ..runs import MINI_MODEL_PATH
from ..runs.arguments import FineTuningArguments
from .labelled_texts import SINGLE, LabelledTextArguments


@dataclass
class FewExamplesArguments(LabelledTextArguments):
    """Model and data."""

    model_name_or_path: str = HfArg(
        default=MINI_MODEL_PATH, help="A NeoBERT or an embedding model: folder or id on the Hub."
    )
    examples_per_class: int = HfArg(default=None, help="Examples drawn of each class. Default: all rows.")
    problem_type: Literal["single_label_classification"] = HfArg(default=SINGLE, help="A row has one class.")
    max_seq_length: int = HfArg(default=128, help="Length in tokens at which texts are truncated.")

    def __post_init__(self):
        super().__post_init__()
        if len(self.text_columns) > 1:
            raise ValueError(
                f"text_columns={' '.join(self.text_columns)}: give one column; a pair has no vector of its own"
            )
        if self.examples_per_class is not None and self.examples_per_class < 2:
            raise ValueError(
                f"examples_per_class={self.examples_per_class} leaves no two texts of one class to compare; give 2 or more"
            )


@dataclass
class FewExamplesTrainingArguments(FineTuningArguments, SentenceTransformerTrainingArguments):
    """Training arguments: some steps, whose number does not depend on that of the examples, without checkpoints."""

    max_steps: int = HfArg(default=20, help="Steps; with -1, num_train_epochs counts.")
    warmup_steps: float = 0.1
    logging_steps: float = 0.05
    eval_strategy: str = "no"
    save_strategy: str = "no"
    load_best_model_at_end: bool = False
    batch_sampler: str = "group_by_label"


def draw_examples(rows: Dataset, per_class: int | None, seed: int) -> Dataset:
    """Draw examples of each class at random, or all that it has.

    Args:
        rows: Rows with a `label`, the number of a class.
        per_class: Number of examples of each class; None returns all rows.
        seed: Seed of the draw.

    Raises:
        ValueError: Fewer than two classes have two rows.
    """
    labels = np.array(rows["label"])
    if sum(count > 1 for count in Counter(labels.tolist()).values()) < 2:
        raise ValueError(
            "fewer than two classes have two examples; add examples, so that texts of one class can be compared"
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    return rows.select(sorted(i for label in np.unique(labels) for i in order[labels[order] == label][:per_class]))


def train_on_triplets(
    model: SentenceTransformer, rows: Dataset, text_column: str, training: FewExamplesTrainingArguments
) -> None:
    """Train an embedding model until texts of one class are closer to one another than to those of other classes.

    Args:
        model: The model.
        rows: Examples, as `draw_examples` returns them.
        text_column: Name of the column of texts.
        training: Training arguments.
    """
    model.model_card_data.widget = [{}]  # otherwise the trainer collects texts of the examples, with a progress bar
    if _has_head(model):  # of an earlier run
        del model[-2:]
    config = model[0].config
    training.choose_learning_rate(config, 2e-4 if config.hidden_size < 768 else 5e-5)  # a few steps need large ones
    rows = rows.select_columns([text_column, "label"])
    SentenceTransformerTrainer(model, training, train_dataset=rows, loss=BatchAllTripletLoss(model)).train()


def add_head(
    model: SentenceTransformer, texts: Sequence[str], labels: Sequence[int], names: Sequence[str]
) -> LogisticRegression:
    """Append a logistic regression to an embedding model, as a linear layer. `encode` then returns the logits of the classes.

    The model also gets a layer before it that scales vectors to length 1, and the names of the classes in its config.

    Args:
        model: The model.
        texts: Examples.
        labels: Number of the class of each example; every class has one.
        names: Names of the classes.

    Returns:
        The logistic regression, on vectors of length 1.
    """
    model.append(Normalize())
    regression = LogisticRegression(max_iter=1000).fit(model.encode(list(texts)), labels)
    weight, bias = regression.coef_, regression.intercept_
    if len(names) == 2:  # scikit-learn has the difference of the two logits
        weight, bias = np.vstack([0 * weight, weight]), np.append(0, bias)
    weight, bias = (torch.tensor(values, dtype=torch.float32) for values in (weight, bias))
    layer = Dense(*weight.T.shape, activation_function=torch.nn.Identity(), init_weight=weight, init_bias=bias)
    model.append(layer.to(model.device))
    config = model[0].config
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    return regression


def classes_of(model: SentenceTransformer, source: str) -> list[str]:
    """Return the names of the classes of a model that has a head of `add_head`.

    Raises:
        ValueError: It has none.
    """
    if not _has_head(model):
        raise ValueError(
            f"{source} has no classes; give --train_file to train them, or a folder that finetune_few_shot.py has saved"
        )
    names = model[0].config.id2label
    return [names[i] for i in range(len(names))]


def _has_head(model: SentenceTransformer) -> bool:
    return isinstance(model[-1], Dense) and model[-1].out_features == len(model[0].config.id2label)
