"""Training of contextual embeddings: recipe, batches, and the loss with two-stage gradient caching.

Source: paper, appendix G; CDE (arXiv 2410.02525), sections 4.1 and 4.2; gradient caching: arXiv 2101.06983.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import RandContext, _create_minibatch, _minibatch_ranges
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

from ..data.files import content_hash, file_hash
from ..model.contextual_neobert import pad_texts
from .contextual import contextual_model
from .contextual_batches import ORDERS, ROW, ContextualBatchSampler, PairClusters, load_or_cluster
from .contrastive import ContrastiveTrainingArguments
from .models import open_embedding_model
from .training import start_files
from .training_sets import CONTEXTUAL_STAGES, load_contextual_stage, read_pairs

logger = logging.get_logger(__name__)

TEMPERATURE = 0.02  # CDE, section 5
CONTEXT_SIZE = 512  # paper, appendix G.2

Features = dict[str, Any]


@dataclass
class ContextualArguments:
    """Model, data, batches and loss of contextual training."""

    model_name_or_path: str = field(
        metadata={
            "help": "A NeoBERT or an embedding model on it, whose weights both stages start from, or a contextual model."
        }
    )
    stage: str = field(
        default=None, metadata={"help": f"Public data of a stage of the paper: {', '.join(CONTEXTUAL_STAGES)}."}
    )
    train_files: list[str] = field(
        default=None,
        metadata={"help": "Pairs in .jsonl, .csv or .parquet, in place of --stage; each file is one dataset."},
    )
    validation_files: list[str] = field(
        default=None,
        metadata={"help": "Pairs for the retrieval evaluation; each file is a corpus with its own context."},
    )
    context_size: int = field(
        default=None,
        metadata={"help": f"Documents of the context. Default: the saved model's, {CONTEXT_SIZE} for a new one."},
    )
    context_dropout: float = field(
        default=None,
        metadata={
            "help": "Probability of dropping a context vector in training. Default: the saved model's, 0.005 for a new one."
        },
    )
    batches: str = field(
        default="clusters",
        metadata={
            "help": "clusters: pairs of one topic in each batch; random: any pairs of a dataset, and no surrogate model."
        },
    )
    surrogate_model: str = field(
        default="thenlper/gte-large", metadata={"help": "Embedding model for the clusters and for false negatives."}
    )
    clusters_dir: str = field(
        default=None,
        metadata={"help": "Folder of the clusters, which later runs read. Default: clusters in output_dir."},
    )
    cluster_size: int = field(
        default=None, metadata={"help": "Mean number of pairs in a cluster. Default: the batch size, as in the paper."}
    )
    cluster_order: str = field(
        default="random",
        metadata={"help": "Order in which clusters are packed into batches: random or travelling (to the nearest)."},
    )
    keep_false_negatives: bool = field(
        default=False,
        metadata={"help": "Use documents as negatives that the surrogate finds as similar as the query's own."},
    )
    temperature: float = field(default=TEMPERATURE, metadata={"help": "Divisor of the cosines in the loss."})
    mini_batch_size: int = field(
        default=32, metadata={"help": "Texts per forward; it determines the memory, and not the gradients."}
    )
    max_seq_length: int = field(
        default=None,
        metadata={"help": "Length in tokens at which texts are truncated. Default: the model's, at most 512."},
    )
    query_prompt: str = field(default="search_query: ", metadata={"help": "Text before each query."})
    document_prompt: str = field(default="search_document: ", metadata={"help": "Text before each document."})

    def __post_init__(self):
        if bool(self.stage) == bool(self.train_files):
            raise ValueError("give either --train_files or --stage")
        if self.stage and self.stage not in CONTEXTUAL_STAGES:
            raise ValueError(f"stage={self.stage!r} is not one of {', '.join(CONTEXTUAL_STAGES)}")
        if self.batches not in ("clusters", "random"):
            raise ValueError(f"batches={self.batches!r} is not one of clusters, random")
        if self.cluster_order not in ORDERS:
            raise ValueError(f"cluster_order={self.cluster_order!r} is not one of {', '.join(ORDERS)}")


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
        if self.max_steps == 0:
            raise ValueError("max_steps=0 would train nothing; give at least 1, or -1 for --num_train_epochs")
        if self.n_gpu > 1:
            raise ValueError(
                f"one process with {self.n_gpu} GPUs would divide the context among them; start one process per GPU with "
                "accelerate launch or torchrun, or set CUDA_VISIBLE_DEVICES=0"
            )


def open_pairs(arguments: ContextualArguments, batch_size: int) -> DatasetDict:
    """Return the datasets by name, with the columns query, document and `ROW`, the number of the row over all datasets.

    Sources of a public stage that have fewer rows than a batch are left out, with a warning.

    Raises:
        ValueError: Two files have the same name, a file has more than two columns or fewer rows than a batch, or is invalid.
    """
    if arguments.stage:
        sets = load_contextual_stage(arguments.stage)
    else:
        names = [Path(file).stem for file in arguments.train_files]
        if len(set(names)) < len(names):
            raise ValueError(
                f"train_files: {names} are not all different; rename a file, its name identifies the dataset"
            )
        sets = {name: read_pairs(file) for name, file in zip(names, arguments.train_files)}
    kept = {}
    for name, rows in sets.items():
        if len(rows.column_names) != 2:
            raise ValueError(
                f"{name} has the columns {', '.join(rows.column_names)}; give pairs, since the other documents of a batch are "
                "the negatives"
            )
        if len(rows) < batch_size and arguments.stage:
            logger.warning(f"{name} has {len(rows)} rows, fewer than the batch size {batch_size}; it is left out")
            continue
        if len(rows) < batch_size:
            raise ValueError(
                f"{name} has {len(rows)} rows, fewer than the batch size {batch_size}; remove the file, or choose a smaller "
                "batch size"
            )
        kept[name] = rows
    return number_rows(kept)


def number_rows(sets: dict[str, Dataset]) -> DatasetDict:
    """Add the column `ROW`, the number of the row over all datasets."""
    first, numbered = 0, {}
    for name, rows in sets.items():
        numbered[name] = rows.add_column(ROW, range(first, first + len(rows)))
        first += len(rows)
    return DatasetDict(numbered)


def use_clusters(
    sets: DatasetDict, arguments: ContextualArguments, training: ContextualTrainingArguments
) -> dict[int, PairClusters]:
    """Read or make the clusters of each dataset, and set the trainer's batch sampler to them.

    Returns:
        Clusters by the number of a dataset's first row.

    Raises:
        ValueError: A file holds the clusters of other texts or settings.
    """
    folder = Path(arguments.clusters_dir or Path(training.output_dir, "clusters"))
    size = arguments.cluster_size or training.per_device_train_batch_size
    files = start_files(arguments.surrogate_model)  # a folder that was trained again is another surrogate
    surrogate = content_hash(list(map(file_hash, map(Path, files)))) if files else arguments.surrogate_model
    loaded: list[SentenceTransformer] = []  # at the first dataset whose clusters do not exist

    def load() -> SentenceTransformer:
        if not loaded:
            loaded.append(open_embedding_model(arguments.surrogate_model, device=str(training.device)))
        return loaded[0]

    with training.main_process_first(desc="clusters"):  # the other processes read the files
        datasets = {
            rows[0][ROW]: load_or_cluster(folder / f"{name}.safetensors", rows, surrogate, size, training.seed, load)
            for name, rows in sets.items()
        }
    training.batch_sampler = partial(ContextualBatchSampler, datasets=datasets, order=arguments.cluster_order)
    return datasets


class Vectors:
    """Wraps the context vectors (J, D), so that they are not divided when a batch is divided into mini-batches."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class ContextualRankingLoss(CachedMultipleNegativesRankingLoss):
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
        if distributed.is_initialized() and torch.is_grad_enabled() and self.wrapper is None:
            raise ValueError(
                "contextual training on several processes needs DistributedDataParallel, since its gradients are complete only "
                "after the last mini-batch; remove FSDP or DeepSpeed from the configuration of accelerate"
            )
        documents = self._sample_context(sentence_features[1])
        ranges = _minibatch_ranges(documents, self.mini_batch_size)
        parts, states = [], []
        for begin, end in ranges:
            with torch.no_grad():
                part = _create_minibatch(documents, begin, end)
                states.append(RandContext(*part.values()))
                parts.append(self.embedder(part)["sentence_embedding"])
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
                    part = self.embedder(_create_minibatch(documents, begin, end))["sentence_embedding"]
                    if part.requires_grad:  # not if the first stage is frozen
                        torch.sum(part * gradient).backward()
            self._average_gradients()

        loss.register_hook(first_stage)
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
        if "cu_seq_lens_q" in documents:
            input_ids, attention_mask = pad_texts(documents["input_ids"], documents["cu_seq_lens_q"])
            documents = {"input_ids": input_ids, "attention_mask": attention_mask}
        num_documents = len(documents["input_ids"])
        if num_documents == self.context_size:  # all of them, in any order
            rows = torch.arange(num_documents)
        elif num_documents > self.context_size:
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
            return self.embedder(part)["sentence_embedding"], state

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
        if labels is None:
            raise ValueError(
                f"the dataset has no column {ROW!r} with row numbers, which finds the false negatives; make it with open_pairs"
            )
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
