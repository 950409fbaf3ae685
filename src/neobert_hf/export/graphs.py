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
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ..files.trust import check_links, holds_tokenizer, load_tokenizer, read_json
from ..hub.doctor import check_sizes, check_tensors, read_subject
from ..model import modeling_neobert
from ..model.modeling_neobert import AUTO_CLASSES, NeoBERTPreTrainedModel

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

EMBEDDING = "sentence-similarity"
# Tasks as the Hub names them: the Auto class of the model, and the outputs of the graph.
TASKS = {
    "feature-extraction": ("AutoModel", ("last_hidden_state",)),
    "fill-mask": ("AutoModelForMaskedLM", ("logits",)),
    "text-classification": ("AutoModelForSequenceClassification", ("logits",)),
    "token-classification": ("AutoModelForTokenClassification", ("logits",)),
    "question-answering": ("AutoModelForQuestionAnswering", ("start_logits", "end_logits")),
    EMBEDDING: ("AutoModel", ("last_hidden_state", "sentence_embedding")),
}
BEFORE_POOLING = {"WordWeights", "Dense"}
AFTER_POOLING = {"Dense", "LayerNorm", "Normalize"}


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

    def reference(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same as users of torch get it."""
        return self(input_ids, attention_mask)

    @property
    def longest(self) -> int:
        """Length in tokens at which texts are truncated."""
        limit = VERY_LARGE_INTEGER if self.tokenizer is None else self.tokenizer.model_max_length
        return limit if limit < VERY_LARGE_INTEGER else self.model.config.max_position_embeddings


class EmbeddingGraph(Graph):
    """The whole chain of an embedding model: network, weights of words, pooling, Dense, normalization.

    `sentence_embedding` is (B, D). `last_hidden_state` is (B, L, D): the states of the tokens after weights and Dense. Their
    pooling is the embedding before its normalization, so runtimes that pool by themselves get the right vector. No such states
    exist if what follows the pooling is not linear, as an activation after a mean; then each token has the embedding itself.

    Args:
        model: The embedding model, on the CPU.
    """

    def __init__(self, model: SentenceTransformer):
        super().__init__(EMBEDDING, model[0].model, model.tokenizer)
        kinds = [type(module).__name__ for module in model]
        where, self.ends_normalized = kinds.index("Pooling"), kinds[-1] == "Normalize"
        self.whole, self.pooling = model, model[where]
        self.before, self.after = (nn.ModuleList(part) for part in (list(model)[1:where], list(model)[where + 1 :]))
        self.between = self.after[: -1 if self.ends_normalized else None]  # pooling and normalization
        mode, is_dense = self.pooling.pooling_mode, all(type(module).__name__ == "Dense" for module in self.between)
        is_affine = is_dense and all(isinstance(module.activation_function, nn.Identity) for module in self.between)
        follows = not self.between or (is_dense and mode in ("cls", "lasttoken")) or (is_affine and mode == "mean")
        self.keeps_tokens = follows and isinstance(mode, str)

    @property
    def longest(self) -> int:
        """Length in tokens at which texts are truncated."""
        return self.whole.max_seq_length or super().longest

    @property
    def dimension(self) -> int:
        """D of the outputs."""
        return self.whole.get_embedding_dimension()

    @property
    def pooling_mode(self) -> str:
        """The pooling that makes the embedding out of `last_hidden_state`."""
        return self.pooling.pooling_mode if self.keeps_tokens else "mean"

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the states of the tokens (B, L, D) and the embeddings (B, D); the inputs are (B, L)."""
        features = {"input_ids": input_ids, "attention_mask": attention_mask}
        features["token_embeddings"] = self.model(**features).last_hidden_state.float()
        for module in self.before:
            features = module(features)
        states = features["token_embeddings"]
        if "token_weights_sum" in features and self.pooling.pooling_mode == "mean":
            # A mean over the mask divides by the number of tokens, not by the sum of their weights.
            weights = features["token_weights_sum"].clamp(min=1e-9)
            states = states * (attention_mask.sum(1) / weights)[:, None, None]
        embedding = self.pooling(features)["sentence_embedding"]
        for module in self.after:
            embedding = module({"sentence_embedding": embedding})["sentence_embedding"]
        if not self.keeps_tokens:
            return embedding[:, None].expand(-1, input_ids.shape[1], -1), embedding
        for module in self.between:
            states = module({"sentence_embedding": states})["sentence_embedding"]
        return states, embedding

    def reference(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The states of the graph, and the embedding of sentence-transformers."""
        states, _ = self(input_ids, attention_mask)
        return states, self.whole({"input_ids": input_ids, "attention_mask": attention_mask})["sentence_embedding"]


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


def open_graph(folder: Path, task: str | None = None) -> Graph:
    """Open a model for the export, in float32 and on the CPU.

    Args:
        folder: Folder of a NeoBERT, or of sentence-transformers.
        task: One of `TASKS`; by default that of the saved model.

    Raises:
        ValueError: The folder holds another kind of model, it cannot be exported, or it lacks the head of the task.
        OSError: A file is missing or damaged.
    """
    if task not in (None, *TASKS):
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}")
    check_links(folder)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter; merge it into its model and export that: "
            "open_adapter(MODEL_CLASS, FOLDER).merge_and_unload().save_pretrained(OUT)"
        )
    task = task or _saved_task(folder)
    _check_weights(folder, task)
    if task == EMBEDDING:
        return EmbeddingGraph(_open_chain(folder))
    _read_config(folder)
    with quiet():  # transformers reports a head that is missing, and so does the error below
        model = AUTO_CLASSES[TASKS[task][0]].from_pretrained(folder, dtype=torch.float32).eval()
    if model.new_layers:
        raise ValueError(
            f"{folder} lacks {' and '.join(sorted(model.new_layers))}, the head for {task}; train the model for this task first, "
            "or give the --task of a head that it has"
        )
    has_tokenizer = holds_tokenizer(folder)
    tokenizer = load_tokenizer(str(folder), model.config.vocab_size, model.config) if has_tokenizer else None
    return Graph(task, model, tokenizer)


def _saved_task(folder: Path) -> str:
    """The task for which the model of a folder was saved."""
    chain = folder / "config_sentence_transformers.json"
    is_chain = (folder / "modules.json").is_file()
    if is_chain and not (chain.is_file() and read_json(chain).get("model_type") == "CrossEncoder"):
        return EMBEDDING
    config = _read_config(folder)
    names = config.get("architectures") or [None]
    model_class = getattr(modeling_neobert, str(names[0]), None)
    for task, (auto_class, _) in TASKS.items():
        if model_class is AUTO_CLASSES[auto_class]:
            return task
    raise ValueError(
        f"architectures={names} in config.json of {folder} cannot be exported; give --task, one of {', '.join(TASKS)}"
    )


def _check_weights(folder: Path, task: str) -> None:
    """Refuse weights of other sizes than config.json has: loading leaves out further blocks, and reports others in many lines."""
    subject = read_subject(str(folder))
    for finding in (*check_sizes(subject), *check_tensors(subject)):
        # A bare encoder leaves the head out, whatever its shape.
        is_used = finding.where.startswith(("config.json", "model.")) or TASKS[task][0] != "AutoModel"
        if finding.code in ("config-mismatch", "shape") and is_used:
            raise ValueError(f"{finding.where}: {finding.meaning}; {finding.mend}")


def _read_config(folder: Path) -> dict:
    """Return the content of config.json, which is that of a NeoBERT."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give the folder of a saved model, or a Hub id")
    config = read_json(folder / "config.json")
    if config.get("model_type") != "neobert":
        raise ValueError(f"{folder} has the model type {config.get('model_type')}, not neobert; choose a NeoBERT")
    return config


def _open_chain(folder: Path) -> SentenceTransformer:
    """Open an embedding model whose modules can be exported, or a bare NeoBERT with mean pooling."""
    from ..embeddings.models import open_embedding_model, sentence_transformer

    options = {"model_kwargs": {"dtype": torch.float32}}
    if (folder / "modules.json").is_file():
        model = open_embedding_model(str(folder), device="cpu", **options)
    else:
        model = sentence_transformer(str(folder), **options).to("cpu")
    _check_chain(model, folder)
    return model.float().eval()


def _check_chain(model: SentenceTransformer, folder: Path) -> None:
    """Refuse an embedding model with a module that a graph cannot hold."""
    kind = getattr(getattr(model[0], "config", None), "model_type", type(model[0]).__name__)
    if kind != "neobert":
        raise ValueError(
            f"{folder} begins with a model of the type {kind}, which cannot be exported; choose an embedding model on a NeoBERT"
        )
    kinds = [type(module).__name__ for module in model]
    if kinds.count("Pooling") != 1:
        raise ValueError(f"{folder} has the modules {', '.join(kinds)}; only a chain with one Pooling can be exported")
    where = kinds.index("Pooling")
    if other := (set(kinds[1:where]) - BEFORE_POOLING) | (set(kinds[where + 1 :]) - AFTER_POOLING):
        raise ValueError(f"{folder} has the module {min(other)}, which cannot be exported; train the model without it")
    if not model[where].include_prompt and any(model.prompts.values()):
        raise ValueError(
            f"{folder} has include_prompt=False, and a graph does not know which tokens are of the prompt; train the model with "
            "include_prompt=True, or remove the prompts"
        )
