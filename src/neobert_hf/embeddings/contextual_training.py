"""Training of contextual embeddings: the loss with two-stage gradient caching, on sentence-transformers' cached loss.

Source: paper, appendix G; CDE (arXiv 2410.02525), sections 4.1 and 4.2; gradient caching: arXiv 2101.06983.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import RandContext, _create_minibatch, _minibatch_ranges
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

from ..model.contextual_neobert import pad_texts
from .contextual import contextual_model
from .contextual_batches import PairClusters

TEMPERATURE = 0.02  # CDE, section 5

Features = dict[str, Any]


class Vectors:
    """Wraps the context vectors (J, D), so that they are not divided when a batch is divided into mini-batches."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class ContextualRankingLoss(CachedMultipleNegativesRankingLoss):
    """Softmax over cosines / temperature from a query to the documents of the batch, all embedded in one context.

    The context is a random sample of the batch's documents. Memory is that of one mini-batch: both stages compute all embeddings
    without gradients first, then again, mini-batch by mini-batch, with gradients. The gradient of the context vectors adds up over
    the mini-batches of the second stage and then goes through the first stage. The result equals that of one graph.

    Args:
        model: A contextual model; a context that it has is removed, since its weights change.
        temperature: Divisor of the cosines.
        mini_batch_size: Texts per forward.
        datasets: Clusters by the number of a dataset's first row. The labels are row numbers then, and documents that the surrogate
            finds at least as similar to a query as its own document are no negatives. None: all other documents are negatives.

    Source: CDE, section 4.2, and its public code for the two stages of caching.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float = TEMPERATURE,
        mini_batch_size: int = 32,
        datasets: dict[int, PairClusters] | None = None,
    ) -> None:
        super().__init__(model, scale=1 / temperature, mini_batch_size=mini_batch_size)
        contextual_model(model).set_context(None)
        self.context_size = contextual_model(model).config.context_size
        self.datasets = datasets

    def forward(self, sentence_features: Iterable[Features], labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of a batch; its `backward` computes the gradients of both stages.

        Args:
            sentence_features: Tokens of B queries, and of B documents.
            labels: (B,) row numbers, for the false negatives.

        Raises:
            ValueError: The batch has not two columns.
        """
        sentence_features = list(sentence_features)
        if len(sentence_features) != 2:
            raise ValueError(
                f"the batch has {len(sentence_features)} columns; give a query and a document, since the other documents of the "
                "batch are the negatives"
            )
        documents = self._sample_context(sentence_features[1])
        ranges = _minibatch_ranges(documents, self.mini_batch_size)
        parts, states = [], []
        for begin, end in ranges:
            with torch.no_grad():
                part = _create_minibatch(documents, begin, end)
                states.append(RandContext(*part.values()))
                parts.append(self.model(part)["sentence_embedding"])
        vectors = torch.cat(parts).requires_grad_(torch.is_grad_enabled())
        shared = Vectors(vectors)
        loss = self.forward_cached([{**each, "dataset_embeddings": shared} for each in sentence_features], labels)
        if not loss.requires_grad:
            return loss

        def first_stage(grad_output: torch.Tensor) -> None:
            # sentence-transformers' hook has run before and has scaled the gradients by grad_output.
            gradients = vectors.grad.split([end - begin for begin, end in ranges])
            for (begin, end), state, gradient in zip(ranges, states, gradients):
                with torch.enable_grad(), state:
                    part = self.model(_create_minibatch(documents, begin, end))["sentence_embedding"]
                    torch.sum(part * gradient).backward()

        loss.register_hook(first_stage)
        return loss

    def _sample_context(self, documents: Features) -> Features:
        """The tokens of J random documents of the batch; with replacement if the batch has fewer."""
        if "cu_seq_lens_q" in documents:
            input_ids, attention_mask = pad_texts(documents["input_ids"], documents["cu_seq_lens_q"])
            documents = {"input_ids": input_ids, "attention_mask": attention_mask}
        num_documents = len(documents["input_ids"])
        if num_documents >= self.context_size:
            rows = torch.randperm(num_documents)[: self.context_size]
        else:
            rows = torch.randint(num_documents, (self.context_size,))
        names = ("input_ids", "attention_mask")
        return {name: documents[name][rows.to(documents[name].device)] for name in names} | {"embeds_context": True}

    def embed_minibatch(
        self,
        sentence_feature: Features,
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[torch.Tensor, RandContext | None]:
        """As in sentence-transformers, with the context vectors."""
        part = _create_minibatch(sentence_feature, begin, end)
        part["dataset_embeddings"] = sentence_feature["dataset_embeddings"].tensor
        with random_state or nullcontext(), torch.set_grad_enabled(with_grad):
            state = RandContext(*part.values()) if copy_random_state else None
            return self.model(part)["sentence_embedding"], state

    def calculate_loss(
        self, reps: list[list[torch.Tensor]], labels: torch.Tensor | None = None, *, with_backward: bool = False
    ) -> torch.Tensor:
        """The mean over queries, computed for `mini_batch_size` queries at a time; called by `forward_cached`."""
        queries, documents = map(torch.cat, reps)
        is_masked = self._false_negatives(labels, queries.device)
        losses = []
        for begin in range(0, len(queries), self.mini_batch_size):
            chunk = queries[begin : begin + self.mini_batch_size]
            scores = F.normalize(chunk, dim=-1) @ F.normalize(documents, dim=-1).T * self.scale
            if is_masked is not None:
                scores = scores.masked_fill(is_masked[begin : begin + len(chunk)], -torch.inf)
            targets = torch.arange(begin, begin + len(chunk), device=scores.device)
            loss = F.cross_entropy(scores, targets, reduction="sum") / len(queries)
            if with_backward:
                loss.backward()
            losses.append(loss.detach() if with_backward else loss)
        return torch.stack(losses).sum()

    def _false_negatives(self, labels: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """(B, B) bool, the documents that are no negatives of a query."""
        if self.datasets is None:
            return None
        rows = labels.cpu().numpy()
        starts = sorted(self.datasets)
        start = starts[bisect.bisect_right(starts, int(rows.min())) - 1]
        return torch.from_numpy(self.datasets[start].is_false_negative(rows - start)).to(device)

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for the model card."""
        return {
            "temperature": self.temperature,
            "mini_batch_size": self.mini_batch_size,
            "context_size": self.context_size,
            "filters_false_negatives": self.datasets is not None,
        }
