"""Training of contextual embeddings: recipe, batches, and the loss with two-stage gradient caching.

Source: paper, appendix G; CDE (arXiv 2410.02525), sections 4.1 and 4.2; gradient caching: arXiv 2101.06983.
"""

# ruff: noqa: RUF009  (HfArg returns a field)

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from contextual_batches import ROW_COLUMN, ContextualBatchSampler, PairClusters, load_or_cluster
from contextual_embeddings import contextual_model
from datasets import DatasetDict, load_dataset
from sentence_transformers import SentenceTransformer
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from neobert_hf.embeddings import (
    ContrastiveTrainingArguments,
    fingerprint,
    open_embedding_model,
    read_sets_of_pairs,
)

logger = logging.get_logger(__name__)

TEMPERATURE = 0.02  # CDE, section 5
CONTEXT_SIZE = 512  # paper, appendix G.2
# Public data for the two stages (appendix G.2). The paper gives sizes only; CDE's public code uses these.
STAGES = {"unsupervised": "nomic-ai/nomic-embed-unsupervised-data", "supervised": "cfli/bge-full-data"}

Features = dict[str, Any]


@dataclass
class ContextualArguments:
    """Model, data, batches and loss of contextual training."""

    model_name_or_path: str = HfArg(
        help="A NeoBERT or an embedding model on it, whose weights both stages start from, or a contextual model."
    )
    stage: Literal["unsupervised", "supervised"] = HfArg(default=None, help="Public data of a stage of the paper.")
    train_files: list[str] = HfArg(default=None, help="Files of pairs, in place of --stage; each file is one dataset.")
    validation_files: list[str] = HfArg(
        default=None, help="Files of pairs for the retrieval evaluation; each is a corpus with its own context."
    )
    context_size: int = HfArg(
        default=None, help=f"Documents of the context. Default: the saved model's, {CONTEXT_SIZE} for a new one."
    )
    context_dropout: float = HfArg(
        default=None, help="Probability of dropping a context vector. Default: the saved model's, 0.005 for a new one."
    )
    batches: Literal["clusters", "random"] = HfArg(
        default="clusters",
        help="clusters: pairs of one topic in each batch; random: any pairs of a dataset, without a surrogate.",
    )
    surrogate_model: str = HfArg(
        default="thenlper/gte-large", help="Embedding model for the clusters and for false negatives."
    )
    clusters_dir: str = HfArg(
        default=None, help="Folder of the clusters, which later runs read. Default: clusters in output_dir."
    )
    cluster_size: int = HfArg(
        default=None, help="Mean number of pairs in a cluster. Default: the batch size, as in the paper."
    )
    keep_false_negatives: bool = HfArg(
        default=False, help="Use documents as negatives that the surrogate finds as similar as the query's own."
    )
    temperature: float = HfArg(default=TEMPERATURE, help="Divisor of the cosines in the loss.")
    mini_batch_size: int = HfArg(default=32, help="Texts per forward; it determines the memory, and not the gradients.")
    max_seq_length: int = HfArg(
        default=None, help="Length in tokens at which texts are truncated. Default: the model's, at most 512."
    )
    query_prompt: str = HfArg(default="search_query: ", help="Text before each query.")
    document_prompt: str = HfArg(default="search_document: ", help="Text before each document.")

    def __post_init__(self):
        if bool(self.stage) == bool(self.train_files):
            raise ValueError("give either --train_files or --stage")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} is not above 0; give a positive number")
        if self.max_seq_length is not None and self.max_seq_length < 3:
            raise ValueError(
                f"max_seq_length={self.max_seq_length} leaves no token between the special ones; give 3 or more"
            )


@dataclass
class ContextualTrainingArguments(ContrastiveTrainingArguments):
    """Training arguments; epochs, batch size, learning rate, warm-up and schedule are the paper's (appendix G.2)."""

    max_steps: int = -1
    num_train_epochs: float = 3
    per_device_train_batch_size: int = CONTEXT_SIZE
    learning_rate: float = 5e-5
    warmup_steps: float = 1000
    weight_decay: float = 0.0
    ddp_timeout: int = 7 * 24 * 3600  # seconds; the other processes wait while the first one makes the clusters

    def __post_init__(self):
        super().__post_init__()
        if self.n_gpu > 1:
            raise ValueError(
                f"one process with {self.n_gpu} GPUs would divide the context among them; start one process per GPU with "
                "accelerate launch or torchrun, or set CUDA_VISIBLE_DEVICES=0"
            )


def open_pairs(arguments: ContextualArguments, batch_size: int) -> DatasetDict:
    """Return the datasets by name, with the columns query, document and `ROW_COLUMN`, the number of the row over all datasets.

    Sources of a public stage that have fewer rows than a batch are left out, with a warning.

    Raises:
        ValueError: Two files have the same name, a file has more than two columns or fewer rows than a batch, or is invalid.
    """
    sets = load_stage(arguments.stage) if arguments.stage else read_sets_of_pairs(arguments.train_files)
    first, numbered = 0, DatasetDict()
    for name, rows in sets.items():
        if len(rows.column_names) != 2:
            raise ValueError(f"{name} has the columns {', '.join(rows.column_names)}; give pairs")
        if len(rows) < batch_size:
            message = f"{name} has {len(rows)} rows, fewer than the batch size {batch_size}"
            if not arguments.stage:
                raise ValueError(f"{message}; remove the file, or give a smaller --per_device_train_batch_size")
            logger.warning(f"{message}; it is left out")
            continue
        numbered[name] = rows.add_column(ROW_COLUMN, range(first, first + len(rows)))
        first += len(rows)
    return numbered


def load_stage(stage: str) -> dict:
    """Load the pairs of a stage from the Hub, by source, since clusters and batches stay within a source."""
    parts = load_dataset(STAGES[stage])  # each split is a source
    if stage == "supervised":  # rows have lists of positives
        parts = {name: rows.map(lambda row: {"document": row["pos"][0]}, desc=name) for name, rows in parts.items()}
    return {name: rows.select_columns(["query", "document"]) for name, rows in parts.items()}


def use_clusters(
    sets: DatasetDict, arguments: ContextualArguments, training: ContextualTrainingArguments
) -> dict[int, PairClusters]:
    """Read or make the clusters of each dataset, and set the trainer's batch sampler to them.

    Returns:
        Clusters by the number of a dataset's first row.
    """
    folder = Path(arguments.clusters_dir or Path(training.output_dir, "clusters"))
    load = cache(partial(open_embedding_model, arguments.surrogate_model, device=str(training.device)))
    size = arguments.cluster_size or training.per_device_train_batch_size
    settings = [fingerprint(load(), {}), size, training.seed]  # a surrogate that was trained again is another one
    with training.main_process_first(desc="clusters"):  # the other processes read the files
        datasets = {
            rows[0][ROW_COLUMN]: load_or_cluster(folder, name, rows, settings, load) for name, rows in sets.items()
        }
    training.batch_sampler = partial(ContextualBatchSampler, datasets=datasets)
    return datasets


class MiniBatches:
    """The mini-batches of some texts, embedded without gradients first, and then again with them.

    Args:
        embedder: Embedding model.
        features: Tokens and attention mask of B texts, (B, L).
        size: Texts per forward.
        more: Other inputs of the model.
    """

    def __init__(self, embedder: SentenceTransformer, features: Features, size: int, **more):
        self.embedder, self.features, self.size, self.more = embedder, features, size, more
        self.random_states = []

    def __iter__(self) -> Iterator[Features]:
        for begin in range(0, len(self.features["input_ids"]), self.size):
            part = {name: tensor[begin : begin + self.size] for name, tensor in self.features.items()}
            width = int(part["attention_mask"].any(0).nonzero().max()) + 1
            yield {**{name: tensor[:, :width] for name, tensor in part.items()}, **self.more}

    @torch.no_grad()
    def embed(self) -> torch.Tensor:
        """Return the embeddings (B, D) without a graph, and keep the random state of each forward."""
        vectors = []
        for part in self:
            self.random_states.append((torch.get_rng_state(), *get_device_states(part["input_ids"])))
            vectors.append(self.embedder(part)["sentence_embedding"])
        return torch.cat(vectors)

    def backward(self, gradients: torch.Tensor) -> None:
        """Embed again with the same random draws, and add to the gradients of all parameters.

        Args:
            gradients: (B, D), of the embeddings.
        """
        for part, random_state, gradient in zip(self, self.random_states, gradients.split(self.size)):
            cpu_state, devices, device_states = random_state
            with torch.enable_grad(), torch.random.fork_rng(devices):
                torch.set_rng_state(cpu_state)
                set_device_states(devices, device_states)
                vectors = self.embedder(part)["sentence_embedding"]
            if vectors.requires_grad:  # not if all of its parameters are frozen
                vectors.backward(gradient)


class ContextualRankingLoss(nn.Module):
    """Softmax over cosines / temperature from a query to the documents of the batch, all embedded in one context.

    The context is a random sample of the batch's documents. Memory is that of one mini-batch: both stages compute all embeddings
    without gradients first, then again, mini-batch by mini-batch, with gradients. The gradient of the context vectors is summed
    over the mini-batches of the second stage and then goes through the first stage. The result equals that of one graph.

    Args:
        model: A contextual model; a context that it has is removed, since its weights change.
        temperature: Divisor of the cosines.
        mini_batch_size: Texts per forward.
        datasets: Clusters by the number of a dataset's first row. The labels are row numbers then, and documents that the
            surrogate finds at least as similar to a query as its own document are no negatives. None: all others are negatives.

    Source: CDE, section 4.2, and its public code for the two stages of caching.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float = TEMPERATURE,
        mini_batch_size: int = 32,
        datasets: dict[int, PairClusters] | None = None,
    ) -> None:
        super().__init__()
        contextual_model(model).set_context(None)
        self.model, self.temperature = model, temperature
        self.mini_batch_size, self.datasets = mini_batch_size, datasets
        self.context_size = contextual_model(model).config.context_size

    def forward(self, sentence_features: Iterable[Features], labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of a batch; its `backward` computes the gradients of both stages.

        Args:
            sentence_features: Tokens of B queries, and of B documents.
            labels: (B,) row numbers, for the false negatives.

        Raises:
            ValueError: The batch has not two columns, or several processes train without DistributedDataParallel.
        """
        names = ("input_ids", "attention_mask")
        columns = [{name: features[name] for name in names} for features in sentence_features]
        if len(columns) != 2:
            raise ValueError(f"the batch has {len(columns)} columns; give pairs of a query and a document")
        if distributed.is_initialized() and torch.is_grad_enabled() and self.wrapper is None:
            raise ValueError(
                "contextual training on several processes needs DistributedDataParallel, since its gradients are complete only "
                "after the last mini-batch; remove FSDP or DeepSpeed from the configuration of accelerate"
            )
        size = self.mini_batch_size
        first_stage = MiniBatches(self.embedder, self._sample_context(columns[1]), size, embeds_context=True)
        context = first_stage.embed().requires_grad_()
        second_stage = [MiniBatches(self.embedder, part, size, dataset_embeddings=context) for part in columns]
        vectors = [part.embed().requires_grad_() for part in second_stage]
        loss = self._ranking_loss(*vectors, labels)
        if not torch.is_grad_enabled():
            return loss

        def backward(grad_output: torch.Tensor) -> None:
            for part, embeddings in zip(second_stage, vectors):
                part.backward(embeddings.grad * grad_output)
            if context.grad is not None:
                first_stage.backward(context.grad)
            self._average_gradients()

        loss.requires_grad_().register_hook(backward)
        return loss

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The model of several processes; with torch_compile it is inside another module."""
        model = getattr(self.model, "_orig_mod", self.model)
        return model if isinstance(model, DistributedDataParallel) else None

    @property
    def embedder(self) -> SentenceTransformer:
        """The model without DistributedDataParallel, which would average gradients before both stages are complete."""
        return self.model if self.wrapper is None else self.wrapper.module

    def _average_gradients(self) -> None:
        """Average the gradients over the processes, once for each optimizer step."""
        if self.wrapper is not None and self.wrapper.require_backward_grad_sync:
            for parameter in self.embedder.parameters():
                if parameter.grad is not None:
                    distributed.all_reduce(parameter.grad)
                    parameter.grad /= distributed.get_world_size()

    def _sample_context(self, documents: Features) -> Features:
        """The tokens of J random documents of the batch; with replacement if the batch has fewer."""
        num_documents = len(documents["input_ids"])
        if num_documents == self.context_size:  # all of them, in any order
            rows = torch.arange(num_documents)
        elif num_documents > self.context_size:
            rows = torch.randperm(num_documents)[: self.context_size]
        else:
            rows = torch.randint(num_documents, (self.context_size,))
        return {name: tensor[rows.to(tensor.device)] for name, tensor in documents.items()}

    def _ranking_loss(
        self, queries: torch.Tensor, documents: torch.Tensor, labels: torch.Tensor | None
    ) -> torch.Tensor:
        """The mean over queries, computed for `mini_batch_size` queries at a time, with the gradients of the embeddings."""
        is_masked = self._false_negatives(labels, queries.device)
        losses = []
        for begin in range(0, len(queries), self.mini_batch_size):
            chunk = queries[begin : begin + self.mini_batch_size]
            scores = F.normalize(chunk, dim=-1) @ F.normalize(documents, dim=-1).T * (1 / self.temperature)
            if is_masked is not None:
                scores = scores.masked_fill(is_masked[begin : begin + len(chunk)], -torch.inf)
            targets = torch.arange(begin, begin + len(chunk), device=scores.device)
            loss = F.cross_entropy(scores, targets, reduction="sum") / len(queries)
            if torch.is_grad_enabled():
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _false_negatives(self, labels: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """(B, B) bool, the documents that are no negatives of a query."""
        if self.datasets is None:
            return None
        rows = labels.cpu().numpy()
        first = max(first for first in self.datasets if first <= rows[0])
        return torch.from_numpy(self.datasets[first].is_false_negative(rows - first)).to(device)
