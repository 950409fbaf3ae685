"""The paper's unified contrastive learning (section 5.2.1, appendix D.2) on sentence-transformers' trainer and losses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

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

from ..commands import Bounds
from ..pretraining.arguments import ResumeArguments
from ..pretraining.manifests import CheckedCheckpoints
from .instructions import SIDES, TRAINING_INSTRUCTIONS
from .training_sets import TRAINING_SETS, load_training_set, read_pairs

TEMPERATURE = 0.07  # paper, appendix D.2
NEXT_PASS = 1_000_003  # added to a sampler's epoch, which seeds its order, for each new pass over its dataset


class SizeExponentBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batches of one dataset each, the dataset drawn with probability n_i^a / sum_j n_j^a; `functools.partial` sets a.

    A dataset that is used up starts again in a new order. The stream is a function of seed and epoch alone, so a resumed run,
    which skips the batches it has seen, goes on with the same ones.

    Args:
        dataset: The datasets, one after another.
        batch_samplers: One for each of them.
        generator: Of the samplers; what is drawn here has its own.
        seed: Of the datasets drawn.
        exponent: a: 0 draws every dataset alike, 1 by its size.
        num_batches: Length of the stream: optimizer steps x devices x accumulation steps.
        group: So many batches in a row come from one dataset. With negatives shared across devices this must be their number,
            since batches that follow one another go to different devices.

    Raises:
        ValueError: A dataset has no full batch, or a number makes no sense.

    Source: paper, appendix D.2, with a = 0.5.
    """

    def __init__(
        self,
        dataset: ConcatDataset,
        batch_samplers: list[BatchSampler],
        generator: torch.Generator | None = None,
        seed: int = 0,
        *,
        num_batches: int,
        exponent: float = 0.5,
        group: int = 1,
    ) -> None:
        super().__init__(dataset, batch_samplers, generator, seed)
        if num_batches < 1 or group < 1 or exponent < 0:
            raise ValueError(f"num_batches={num_batches}, group={group}: at least 1; exponent={exponent}: at least 0")
        if num_batches % group:
            raise ValueError(f"num_batches={num_batches} is no multiple of group={group}")
        for part, sampler in zip(dataset.datasets, batch_samplers):
            if not len(sampler):
                raise ValueError(
                    f"a dataset of {len(part)} rows fills no batch of {sampler.batch_size}; leave it out, or take smaller batches"
                )
        self.num_batches, self.exponent, self.group = num_batches, exponent, group

    def __iter__(self) -> Iterator[list[int]]:
        sizes = [len(part) for part in self.dataset.datasets]
        offsets = [0, *itertools.accumulate(sizes)]
        own = torch.Generator().manual_seed(self.seed + self.epoch)
        weights = torch.tensor(sizes, dtype=torch.float64) ** self.exponent
        draws = torch.multinomial(weights, self.num_batches // self.group, replacement=True, generator=own)
        streams = [self._passes(sampler) for sampler in self.batch_samplers]
        for drawn in draws.repeat_interleave(self.group).tolist():
            yield [offsets[drawn] + row for row in next(streams[drawn])]

    def _passes(self, sampler: BatchSampler) -> Iterator[list[int]]:
        for number in itertools.count():
            sampler.set_epoch(self.epoch + NEXT_PASS * number)
            if sampler.generator is not None:  # all samplers share it, and draw their order as soon as they start
                sampler.generator.manual_seed(self.seed + sampler.epoch)
            batch = None
            for batch in sampler:
                yield batch
            if batch is None:
                raise ValueError(
                    f"a dataset of {len(sampler.dataset)} rows fills no batch of {sampler.batch_size} without duplicates; "
                    "leave it out, or take smaller batches"
                )

    def __len__(self) -> int:
        return self.num_batches


@dataclass
class ContrastiveArguments:
    """Model, data and loss."""

    model_name_or_path: str = field(
        metadata={"help": "A NeoBERT with its tokenizer, or what an earlier run has saved."}
    )
    training_sets: list[str] = field(
        default=None, metadata={"help": "Of the paper's Table 7, from the Hub; all of them."}
    )
    train_files: list[str] = field(
        default=None, metadata={"help": "Pairs or triplets in .jsonl, .csv or .parquet, in place of the paper's sets."}
    )
    validation_files: list[str] = field(default=None, metadata={"help": "Pairs to measure retrieval on."})
    instructions: str = field(
        default=None, metadata={"help": "JSON file of an instruction for each file, by its name without the ending."}
    )
    instruction_template: str = field(default="{instruction} ", metadata={"help": "What is put before a text."})
    instruction_sides: str = field(default="both", metadata={"help": "both, or query: the first column only."})
    temperature: Annotated[float, Bounds(1e-4, 100)] = field(
        default=TEMPERATURE, metadata={"help": "Divides the cosines."}
    )
    sampling_exponent: Annotated[float, Bounds(0, 10)] = field(
        default=0.5, metadata={"help": "A set is drawn by its size to this power."}
    )
    mini_batch_size: Annotated[int, Bounds(1, 1 << 30)] = field(
        default=None,
        metadata={"help": "Gradient caching (arXiv 2101.06983): so many texts at once, the same gradients."},
    )
    gather_across_devices: bool = field(default=False, metadata={"help": "Negatives of all devices count."})
    num_mined_negatives: Annotated[int, Bounds(0, 1000)] = field(
        default=0, metadata={"help": "Mine so many hard negatives for each pair with the model as it is at the start."}
    )
    pooling: str = field(
        default=None,
        metadata={"help": "mean, as in the paper, or cls, of a bare NeoBERT; a saved model keeps its own."},
    )
    max_seq_length: Annotated[int, Bounds(3, 1 << 20)] = field(
        default=None,
        metadata={"help": "Where texts are cut, in tokens; the model's own length, at most 512, which is ours."},
    )

    def __post_init__(self):
        if "{instruction}" not in self.instruction_template:
            raise ValueError(f"instruction_template={self.instruction_template!r} has no place for {{instruction}}")
        if self.instruction_sides not in SIDES:
            raise ValueError(f"instruction_sides={self.instruction_sides!r} is none of {SIDES}")
        if self.pooling not in (None, "mean", "cls"):
            raise ValueError(f"pooling={self.pooling!r} is neither 'mean' nor 'cls'")
        if self.train_files and self.training_sets:
            raise ValueError("give --train_files or --training_sets, not both")
        if unknown := set(self.training_sets or ()) - set(TRAINING_SETS):
            raise ValueError(
                f"there is no training set {', '.join(sorted(unknown))}; the paper's are {', '.join(TRAINING_SETS)}"
            )
        if self.instructions and not self.train_files:
            raise ValueError(
                "instructions belong to train_files; the paper's sets have their own, leave --instructions out"
            )


@dataclass
class ContrastiveTrainingArguments(ResumeArguments, SentenceTransformerTrainingArguments):
    """The trainer's arguments. 2,000 steps are the paper's; batch, learning rate and schedule it does not give are ours."""

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


class ContrastiveTrainer(CheckedCheckpoints, SentenceTransformerTrainer):
    """sentence-transformers' trainer, whose checkpoints carry a manifest."""


def open_training_sets(arguments: ContrastiveArguments, seed: int = 0) -> tuple[DatasetDict, dict[str, str]]:
    """Return the sets by name, and the prompt of each that has an instruction.

    Raises:
        ValueError: Two files have one name, an instruction belongs to no set, or a file is not as it must be.
    """
    if arguments.train_files:
        names = [Path(file).stem for file in arguments.train_files]
        if len(set(names)) < len(names):
            raise ValueError(f"train_files: {names} are not all different; a set is known by its file's name")
        instructions = _read_instructions(arguments.instructions) if arguments.instructions else {}
        if unknown := set(instructions) - set(names):
            raise ValueError(f"{arguments.instructions}: {', '.join(sorted(unknown))} is none of the sets {names}")
        sets = {name: read_pairs(file) for name, file in zip(names, arguments.train_files)}
    else:
        sets = {name: load_training_set(name, seed) for name in arguments.training_sets or TRAINING_SETS}
        instructions = {name: TRAINING_INSTRUCTIONS[name] for name in sets}
    template = arguments.instruction_template
    return DatasetDict(sets), {name: template.replace("{instruction}", text) for name, text in instructions.items()}


def _read_instructions(file: str) -> dict[str, str]:
    try:
        instructions = json.loads(Path(file).read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # the former names the line
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(instructions, dict) or not all(isinstance(text, str) for text in instructions.values()):
        raise ValueError(f'{file} is not an object of texts, as {{"name of a file": "its instruction"}}')
    return instructions


def mine_negatives(
    sets: DatasetDict, prompts: dict[str, str], model: SentenceTransformer, num_negatives: int, sides: str = "both"
) -> DatasetDict:
    """Give each pair the documents of its set that the model takes for its answer most, as hard negatives.

    Pairs for which there are not so many are left out, as sentence-transformers does.

    Args:
        sets: Pairs by name.
        prompts: As `open_training_sets` returns them.
        model: What mines.
        num_negatives: For each pair.
        sides: Whether documents have the instruction too.

    Raises:
        ValueError: A set has negatives already, which mining would throw away.
    """
    mined = {}
    for name, rows in sets.items():
        if len(rows.column_names) > 2:
            raise ValueError(f"{name} has negatives already ({', '.join(rows.column_names[2:])}); mine for pairs only")
        prompt = prompts.get(name)
        mined[name] = mine_hard_negatives(
            rows,
            model,
            num_negatives=num_negatives,
            output_format="n-tuple",
            query_prompt=prompt,
            corpus_prompt=prompt if sides == "both" else None,
        )
    return DatasetDict(mined)


def column_prompts(sets: DatasetDict, prompts: dict[str, str], sides: str = "both") -> dict[str, dict[str, str]]:
    """Return the prompt of each column of each set, as the trainer takes them: of all columns, or of the first one."""
    return {
        name: dict.fromkeys(sets[name].column_names[: 1 if sides == "query" else None], prompt)
        for name, prompt in prompts.items()
    }


def contrastive_loss(
    model: SentenceTransformer,
    temperature: float = TEMPERATURE,
    mini_batch_size: int | None = None,
    gather_across_devices: bool = False,
) -> nn.Module:
    """Return the paper's loss: softmax over cosines / temperature, query to document; all documents of the batch are negatives.

    Args:
        model: What embeds.
        temperature: tau.
        mini_batch_size: With gradient caching, so many texts at once; None embeds the batch at once.
        gather_across_devices: Whether documents of the other devices are negatives as well.

    Source: paper, section 5.2.1.
    """
    options = dict(scale=1 / temperature, gather_across_devices=gather_across_devices)
    if mini_batch_size:
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=mini_batch_size, **options)
    return MultipleNegativesRankingLoss(model, **options)


def set_sampling(training: ContrastiveTrainingArguments, arguments: ContrastiveArguments) -> None:
    """Have the trainer draw datasets by their size to the exponent, for exactly as many batches as it will take."""
    world = training.world_size
    training.multi_dataset_batch_sampler = partial(
        SizeExponentBatchSampler,
        exponent=arguments.sampling_exponent,
        num_batches=training.max_steps * training.gradient_accumulation_steps * world,
        group=world if arguments.gather_across_devices else 1,
    )
