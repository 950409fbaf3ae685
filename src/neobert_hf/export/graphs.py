"""What an exported file computes: a module of torch with the inputs `input_ids` and `attention_mask`, for each kind of model.

Axes: `B` rows, `L` columns; `D` hidden, or the dimension of an embedding.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..embeddings.models import check_modules, has_head
from ..files.texts import printable
from ..files.trust import (
    check_links,
    check_vocabulary,
    holds_tokenizer,
    keep_known_settings,
    load_tokenizer,
    resolve,
)
from ..hub.layouts import check_weights, read_config
from ..model import modeling_neobert
from ..model.modeling_neobert import AUTO_CLASSES, NeoBERTPreTrainedModel

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

EMBEDDING, CLASSIFICATION = "sentence-similarity", "text-classification"
# Tasks as the Hub names them: the Auto class of the model, and the outputs of the graph.
TASKS = {
    "feature-extraction": ("AutoModel", ("last_hidden_state",)),
    "fill-mask": ("AutoModelForMaskedLM", ("logits",)),
    CLASSIFICATION: ("AutoModelForSequenceClassification", ("logits",)),
    "token-classification": ("AutoModelForTokenClassification", ("logits",)),
    "question-answering": ("AutoModelForQuestionAnswering", ("start_logits", "end_logits")),
    EMBEDDING: ("AutoModel", ("last_hidden_state", "sentence_embedding")),
}
LOADING = {"dtype": torch.float32, "ignore_mismatched_sizes": True}  # `check_weights` refuses such sizes in one line


class Graph(nn.Module):
    """A model, and the outputs that an exported file computes.

    Attributes:
        task: One of `TASKS`.
        outputs: Names of the outputs.
        model: The NeoBERT.
        tokenizer: Its tokenizer, or None if the folder has none.
    """

    def __init__(self, task: str, model: NeoBERTPreTrainedModel, tokenizer: PreTrainedTokenizerBase | None):
        super().__init__()
        self.task, self.outputs = task, TASKS[task][1]
        self.model, self.tokenizer = model, tokenizer

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs in the order of `outputs`; the inputs are (B, L)."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return tuple(found[name].float() for name in self.outputs)

    @property
    def architecture(self) -> str:
        """The class that config.json names, by which other programs know the task."""
        return type(self.model).__name__

    @property
    def longest(self) -> int:
        """Length in tokens at which texts are truncated."""
        limit = self.model.config.max_position_embeddings
        return limit if self.tokenizer is None else min(limit, self.tokenizer.model_max_length)


class EmbeddingGraph(Graph):
    """The whole chain of an embedding model: network, weights of words, pooling, Dense, normalization.

    `sentence_embedding` is (B, D). `last_hidden_state` is (B, L, D), and its pooling is the embedding before its normalization:
    runtimes that pool by themselves get the right vector. It holds the states of the tokens if nothing but a normalization is
    around the pooling. Otherwise each token has the embedding itself.

    The embedding of a classifier that was trained with few examples is the logits (B, C) of its classes, its only output.

    Args:
        chain: The embedding model, on the CPU.
        task: "sentence-similarity", or "text-classification" for a classifier.
    """

    def __init__(self, chain: SentenceTransformer, task: str = EMBEDDING):
        super().__init__(task, chain[0].model, chain.tokenizer)
        self.chain, self.modules_after = chain, nn.ModuleList(list(chain)[1:])
        self.kinds = [type(module).__name__ for module in self.modules_after]
        self.pooling = self.modules_after[self.kinds.index("Pooling")]
        # Their mean does not depend on a factor, and products with large ones overflow in runtimes of float16.
        if "WordWeights" in self.kinds:
            weight = self.modules_after[self.kinds.index("WordWeights")].emb_layer.weight.data
            weight *= 2.0 ** (4 - torch.frexp(weight.max()).exponent)  # at most 16, without rounding
        self.ends_normalized = self.kinds[-1] == "Normalize"
        is_bare = self.kinds in (["Pooling"], ["Pooling", "Normalize"])
        self.keeps_tokens = is_bare and isinstance(self.pooling.pooling_mode, str)

    @property
    def architecture(self) -> str:
        """As of a `Graph`."""
        is_classifier = self.task == CLASSIFICATION
        return AUTO_CLASSES[TASKS[CLASSIFICATION][0]].__name__ if is_classifier else super().architecture

    @property
    def longest(self) -> int:
        """Length in tokens at which texts are truncated."""
        return self.chain.max_seq_length or super().longest

    @property
    def pooling_mode(self) -> str:
        """The pooling that makes the embedding out of `last_hidden_state`."""
        return self.pooling.pooling_mode if self.keeps_tokens else "mean"

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the states of the tokens (B, L, D) and the embeddings (B, D), or the logits (B, C); the inputs are (B, L)."""
        features = {"input_ids": input_ids, "attention_mask": attention_mask}
        states = features["token_embeddings"] = self.model(**features).last_hidden_state.float()
        for module in self.modules_after:
            features = module(features)
        embedding = features["sentence_embedding"]
        if self.task == CLASSIFICATION:
            return (embedding,)
        if not self.keeps_tokens:
            states = embedding[:, None].expand(-1, input_ids.shape[1], -1)
        return states, embedding


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what libraries print and warn of while they load and export a model; errors pass."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def load_graph(source: str | Path, task: str | None = None) -> Graph:
    """Load a model for the export, in float32 and on the CPU. What it returns is trusted: no file is opened after it.

    Args:
        source: Folder or Hub id of a NeoBERT, or of an embedding model of sentence-transformers.
        task: One of `TASKS`; by default that of the saved model.

    Raises:
        ValueError: The folder holds another kind of model, damaged weights, no head for the task, or what a graph cannot hold.
        OSError: A file is missing or damaged, or the repository cannot be reached.
    """
    if task not in (None, *TASKS):
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}")
    folder = resolve(source)
    check_links(folder)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter; merge it into its model and export that: "
            "open_adapter(MODEL_CLASS, FOLDER).merge_and_unload().save_pretrained(OUT)"
        )
    kind = check_modules(folder) or "SentenceTransformer"
    is_chain = (folder / "modules.json").is_file() and kind != "CrossEncoder"
    if task is None and not is_chain:
        task = _saved_task(folder, read_config(folder))
    if task == EMBEDDING or (is_chain and task in (None, CLASSIFICATION)):
        chain = _load_chain(folder, kind)
        if task == CLASSIFICATION and not has_head(chain):
            raise ValueError(
                f"{folder} holds an embedding model without classes; leave out --task, or export a classifier"
            )
        graph = EmbeddingGraph(chain, task or (CLASSIFICATION if has_head(chain) else EMBEDDING))
    else:
        tokenizer = load_tokenizer(str(folder)) if holds_tokenizer(folder) else None
        with quiet():  # transformers reports a head that is missing, and so does `check_weights`
            model = AUTO_CLASSES[TASKS[task][0]].from_pretrained(folder, **LOADING)
        keep_known_settings(model.config, folder)
        graph = Graph(task, model, tokenizer)
    check_weights(graph.model, folder, graph.task, graph)
    return graph.float().eval()


def _saved_task(folder: Path, config: dict) -> str:
    """The task for which a NeoBERT was saved."""
    names = config.get("architectures") or [None]
    model_class = getattr(modeling_neobert, str(names[0]), None)
    for task, (auto_class, _) in TASKS.items():
        if model_class is AUTO_CLASSES[auto_class]:
            return task
    raise ValueError(
        f"{folder} has no config.json of a NeoBERT that can be exported, it names {names[0]}; give the folder of a saved model, "
        f"or one of these as --task: {', '.join(TASKS)}"
    )


def _load_chain(folder: Path, kind: str) -> SentenceTransformer:
    """Load an embedding model that a graph can hold, or a bare NeoBERT with mean pooling."""
    from ..embeddings.common_form import SentenceTransformer

    if kind != "SentenceTransformer":
        raise ValueError(
            f"{folder} holds a {printable(str(kind))}, which gives no single vector for each text and cannot be exported"
        )
    with quiet():
        chain = SentenceTransformer(str(folder), device="cpu", model_kwargs=LOADING)
    kinds = [type(module).__name__ for module in chain]
    model_type = getattr(getattr(chain[0], "config", None), "model_type", kinds[0])
    if model_type != "neobert" or kinds.count("Pooling") != 1:
        raise ValueError(
            f"{folder} begins with {model_type} and has the modules {', '.join(kinds)}; only a NeoBERT with one Pooling can be "
            "exported"
        )
    if not chain[kinds.index("Pooling")].include_prompt:
        raise ValueError(
            f"{folder} has include_prompt=False, and a graph does not know which tokens are of the prompt; train the model with "
            "include_prompt=True, or set it in the config.json of the pooling if the model has no prompts"
        )
    check_vocabulary(chain.tokenizer, folder, chain[0].config.vocab_size)
    keep_known_settings(chain[0].config, folder)
    chain[0].processor = keep_known_settings(chain.tokenizer, folder)
    return chain
