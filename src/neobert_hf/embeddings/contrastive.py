"""Contrastive training on pairs by sentence-transformers' trainer and losses, with the paper's loss and mixture of sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from datasets import DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import MultiDatasetDefaultBatchSampler
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import mine_hard_negatives
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset

from neobert_cli.parser import option

from ..checkpoints.embedding_models import warn_of_truncated
from ..files.messages import first_of
from ..runs import ResumeArguments
from .pairs import Sets, as_sets, texts_of
from .retrieval import pairs_evaluators
from .training import PairArguments, PairTrainer, train_and_record

TEMPERATURE = 0.07  # paper, appendix D.2
NEXT_PASS = 1_000_003  # added to a sampler's epoch, which seeds the row order, for each new pass over its dataset


class WeightedBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batch sampler over several datasets: each batch comes from one dataset, drawn in proportion to its weight.

    An exhausted dataset starts again in a new order. The stream depends only on seed and epoch, so a resumed run, which skips
    the batches it has seen, continues with the same batches.

    Args:
        dataset: The concatenated datasets.
        batch_samplers: One batch sampler for each dataset.
        generator: Generator that the batch samplers share; the draw of datasets uses its own generator.
        seed: Seed of the draw of datasets and of the row orders.
        num_batches: Length of the stream: optimizer steps x devices x accumulation steps.
        weights: Probability of each dataset up to a common factor; None takes the square root of its number of rows.
        group: Number of consecutive batches from one dataset. With negatives shared across devices it must be the number of
            devices, since consecutive batches go to different devices.

    Raises:
        ValueError: A dataset has fewer rows than the batch size, or too many duplicates for one batch.

    Source: paper, appendix D.2, for the square root.
    """

    def __init__(
        self,
        dataset: ConcatDataset,
        batch_samplers: list[BatchSampler],
        generator: torch.Generator | None = None,
        seed: int = 0,
        *,
        num_batches: int,
        weights: Sequence[float] | None = None,
        group: int = 1,
    ) -> None:
        super().__init__(dataset, batch_samplers, generator, seed)
        for part, sampler in zip(dataset.datasets, batch_samplers):
            if not len(sampler):
                fault = f"a dataset of {len(part)} rows has fewer rows than the batch size {sampler.batch_size}"
                raise ValueError(f"{fault}; remove the dataset, or give a smaller per_device_train_batch_size")
        self.num_batches = num_batches
        self.weights = weights or [len(part) ** 0.5 for part in dataset.datasets]
        self.group = group

    def __iter__(self) -> Iterator[list[int]]:
        sizes = [len(part) for part in self.dataset.datasets]
        offsets = [0, *itertools.accumulate(sizes)]
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        weights = torch.tensor(self.weights, dtype=torch.float64)
        draws = torch.multinomial(weights, self.num_batches // self.group, replacement=True, generator=generator)
        streams = [self._passes(sampler) for sampler in self.batch_samplers]
        for drawn in draws.repeat_interleave(self.group).tolist():
            yield [offsets[drawn] + row for row in next(streams[drawn])]

    def _passes(self, sampler: BatchSampler) -> Iterator[list[int]]:
        for number in itertools.count():
            sampler.set_epoch(self.epoch + NEXT_PASS * number)
            if sampler.generator is not None:  # all samplers share it and draw their order when they start
                sampler.generator.manual_seed(self.seed + sampler.epoch)
            batch = None
            for batch in sampler:
                yield batch
            if batch is None:
                fault = f"a set of {len(sampler.dataset)} rows has no batch of {sampler.batch_size} rows without duplicate texts"
                raise ValueError(f"{fault}; remove the dataset, or give a smaller per_device_train_batch_size")

    def __len__(self) -> int:
        return self.num_batches


@dataclass
class ContrastiveArguments(PairArguments):
    """Model, data and loss of contrastive training."""

    temperature: float = option("Divisor of the cosines in the loss.", TEMPERATURE)
    mini_batch_size: int = option("Texts per forward, with gradient caching (arXiv 2101.06983).")
    gather_across_devices: bool = option("Use the documents of all devices as negatives.", False)
    num_mined_negatives: int = option("Hard negatives that the initial model finds for each pair.", 0)
    pooling: Literal["mean", "cls"] = option(
        "mean, as in the paper, or cls, for a bare NeoBERT; a saved embedding model keeps its own."
    )

    def __post_init__(self):
        super().__post_init__()
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} is not above 0; give a positive number")


@dataclass
class ContrastiveTrainingArguments(ResumeArguments, SentenceTransformerTrainingArguments):
    """Training arguments. The 2,000 steps are the paper's; batch size, learning rate and schedule are our choice."""

    max_steps: int = 2000
    per_device_train_batch_size: int = 256
    learning_rate: float = 5e-5
    warmup_steps: float = 200
    lr_scheduler_type: str = "linear"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    batch_sampler: str = "no_duplicates"
    dataloader_drop_last: bool = True
    logging_steps: int = 50
    save_steps: int = 500


class ContrastiveTrainer(PairTrainer, SentenceTransformerTrainer):
    """sentence-transformers' trainer with a manifest in each checkpoint; it does not train weights of words."""


def mine_negatives(
    sets: Sets,
    model: SentenceTransformer,
    num_negatives: int,
    query_prompt: str | None = None,
    corpus_prompt: str | None = None,
    **options,
) -> DatasetDict:
    """Add to each pair the most similar other documents of its set as hard negatives.

    sentence-transformers drops a pair if it finds fewer negatives than requested.

    Args:
        sets: Pairs by name of the set.
        model: Embedding model that ranks the documents.
        num_negatives: Number of negatives for each pair.
        query_prompt: Text before each query.
        corpus_prompt: Text before each document.
        options: Other arguments of sentence-transformers' `mine_hard_negatives`.

    Raises:
        ValueError: A set already has negatives, which mining would discard.
    """
    mined = DatasetDict()
    options = {"output_format": "n-tuple", "num_negatives": num_negatives} | options
    for name, rows in as_sets(sets, "train").items():
        negatives = rows.column_names[2:]
        if negatives:
            raise ValueError(f"{name} already has negatives ({first_of(negatives)}); mine for sets of pairs only")
        texts = texts_of(rows, query_prompt or "", corpus_prompt or "")
        warn_of_truncated(model, f"negatives of {name}", texts)
        mined[name] = mine_hard_negatives(
            rows, model, query_prompt=query_prompt, corpus_prompt=corpus_prompt, **options
        )
    return mined


def contrastive_loss(
    model: SentenceTransformer,
    temperature: float = TEMPERATURE,
    mini_batch_size: int | None = None,
    gather_across_devices: bool = False,
) -> nn.Module:
    """Return the paper's loss: softmax over cosines / temperature from a query to all documents of the batch.

    Args:
        model: Embedding model.
        temperature: Temperature tau, the divisor of the cosines.
        mini_batch_size: Number of texts per forward with gradient caching; None embeds the batch in one forward.
        gather_across_devices: Whether documents of other devices are negatives too.

    Source: paper, section 5.2.1.
    """
    options = dict(scale=1 / temperature, gather_across_devices=gather_across_devices)
    if mini_batch_size:
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=mini_batch_size, **options)
    return MultipleNegativesRankingLoss(model, **options)


def set_sampling(
    training: ContrastiveTrainingArguments,
    gather_across_devices: bool = False,
    weights: Sequence[float] | None = None,
) -> None:
    """Set the trainer's batch sampler to `WeightedBatchSampler`, with exactly the number of batches of the run.

    Args:
        training: Training arguments, which are changed.
        gather_across_devices: Whether the loss shares negatives across devices.
        weights: Probability of each dataset up to a common factor; None takes the square root of its number of rows.

    Raises:
        ValueError: `max_steps` is not positive.
    """
    if training.max_steps < 1:
        raise ValueError(f"max_steps={training.max_steps}, but sampled datasets have no epochs; give at least 1 step")
    world = training.world_size
    training.multi_dataset_batch_sampler = partial(
        WeightedBatchSampler,
        weights=weights,
        num_batches=training.max_steps * training.gradient_accumulation_steps * world,
        group=world if gather_across_devices else 1,
    )


def train_contrastive(
    model: SentenceTransformer,
    sets: Sets,
    training: ContrastiveTrainingArguments,
    arguments: ContrastiveArguments | None = None,
    held_out: Sets | None = None,
) -> list[dict]:
    """Train an embedding model on pairs or triplets, in the folder `training.output_dir`, and save it there.

    Args:
        model: Embedding model, such as of `sentence_transformer`.
        sets: Columns anchor, positive and negatives, by name of the set; a single set has the name train.
        training: Training arguments, of which the sampler is changed.
        arguments: The loss.
        held_out: Pairs to evaluate on before and after the training, by name.

    Returns:
        As `train_and_record`.

    Raises:
        ValueError: A set is too small for a batch, or as of `train_and_record`.
        FileExistsError: As of `train_and_record`.
    """
    arguments = arguments or ContrastiveArguments(model[0].model.name_or_path)
    sets = as_sets(sets, "train")
    held_out = as_sets(held_out or {}, "held_out")
    for name, rows in (*sets.items(), *held_out.items()):
        warn_of_truncated(model, f"{len(rows):,} rows of {name}", texts_of(rows))
    set_sampling(training, arguments.gather_across_devices)
    loss = contrastive_loss(model, arguments.temperature, arguments.mini_batch_size, arguments.gather_across_devices)
    evaluators = pairs_evaluators(held_out)
    return train_and_record(ContrastiveTrainer, model, training, sets, loss, evaluators, arguments)
