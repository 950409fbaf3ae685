"""The paper's unified contrastive learning (section 5.2.1, appendix D.2) on sentence-transformers' trainer and losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from sentence_transformers.base.sampler import MultiDatasetDefaultBatchSampler
from torch.utils.data import BatchSampler, ConcatDataset

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
            yield from sampler

    def __len__(self) -> int:
        return self.num_batches
