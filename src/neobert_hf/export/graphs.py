"""What an exported file computes: a module of torch with the inputs `input_ids` and `attention_mask`, for each kind of model.

Axes: `B` rows, `L` columns; `D` hidden, or the dimension of an embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import get_logger

from ..checkpoints.embedding_models import adopt
from ..checkpoints.network import AUTO_CLASS_OF, check_finite, class_of
from ..checkpoints.saved_model import SavedModel
from ..checkpoints.tokenizer import keep_known_settings
from ..files.terminal import printable, quiet
from ..model.modeling_neobert import AUTO_CLASSES, NeoBERTPreTrainedModel

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

logger = get_logger(__name__)

EMBEDDING, CLASSIFICATION = "sentence-similarity", "text-classification"
SPARSE, MULTI_VECTOR = "sparse-encoder", "multi-vector"
# Tasks as the Hub names them, the last two by a tag: the kind of a saved model, and the outputs of the graph.
TASKS = {
    "feature-extraction": ("encoder", ("last_hidden_state",)),
    "fill-mask": ("masked words", ("logits",)),
    CLASSIFICATION: ("classes", ("logits",)),
    "token-classification": ("tags", ("logits",)),
    "question-answering": ("spans", ("start_logits", "end_logits")),
    EMBEDDING: ("vector", ("last_hidden_state", "sentence_embedding")),
    SPARSE: ("sparse", ("sparse_embedding",)),
    MULTI_VECTOR: ("multi-vector", ("token_embeddings", "query_mask", "document_mask")),
}
TASK_OF = {kind: task for task, (kind, _) in TASKS.items()} | {"score": CLASSIFICATION}
LOADING = {"dtype": torch.float32}


class Graph(nn.Module):
    """A model, and the outputs that an exported file computes.

    Attributes:
        task: One of `TASKS`.
        outputs: Names of the outputs.
        model: The NeoBERT.
        tokenizer: Its tokenizer, or None if the folder has none.
        prompts: What the folder says of the prompt before each text of a classifier; empty if it has none.
        saved: What the folder holds from which it was loaded.
    """

    saved: SavedModel

    def __init__(self, task: str, model: NeoBERTPreTrainedModel, tokenizer: PreTrainedTokenizerBase | None):
        super().__init__()
        self.task = task
        self.outputs = TASKS[task][1]
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = {}

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs in the order of `outputs`; the inputs are (B, L)."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return tuple(found[name].float() for name in self.outputs)

    @property
    def longest(self) -> int:
        """Length in tokens at which texts are truncated."""
        limit = self.model.config.max_position_embeddings
        return limit if self.tokenizer is None else min(limit, self.tokenizer.model_max_length)


class EmbeddingGraph(Graph):
    """The whole chain of an embedding model: network, weights of words, pooling, Dense, normalization, truncation.

    `sentence_embedding` is (B, D). `last_hidden_state` is (B, L, D), and its pooling is the embedding before its normalization:
    runtimes that pool by themselves get the right vector. It holds the states of the tokens if nothing but a normalization is
    around the pooling. Otherwise each token has the embedding itself.

    The only output of a reranker is its logits (B, C).

    Args:
        chain: The embedding model or the reranker, on the CPU.
        task: "sentence-similarity", or "text-classification" for a reranker.
    """

    def __init__(self, chain: SentenceTransformer | CrossEncoder, task: str = EMBEDDING):
        super().__init__(task, chain[0].model, chain.tokenizer)
        self.chain = chain
        self.modules_after = nn.ModuleList(list(chain)[1:])
        self.kinds = [type(module).__name__ for module in self.modules_after]
        self.result = "scores" if type(chain).__name__ == "CrossEncoder" else "sentence_embedding"
        self.dimension = getattr(chain, "truncate_dim", None)  # `encode` cuts behind all modules
        self.kinds += ["truncate_dim"] * (self.dimension is not None)
        self.pooling = self.modules_after[self.kinds.index("Pooling")]
        # Their mean does not depend on a factor, and products with large ones overflow in runtimes of float16.
        if "WordWeights" in self.kinds:
            weight = self.modules_after[self.kinds.index("WordWeights")].emb_layer.weight.data
            weight *= 2.0 ** (4 - torch.frexp(weight.max()).exponent)  # at most 16, without rounding
        # a Normalize may be one of token states
        self.ends_normalized = self.kinds[-1] == "Normalize" and chain[-1].module_output_name == self.result
        is_bare = self.kinds in (["Pooling"], ["Pooling", "Normalize"])
        self.keeps_tokens = is_bare and isinstance(self.pooling.pooling_mode, str)
        self.pooling_mode = self.pooling.pooling_mode if self.keeps_tokens else "mean"  # of `last_hidden_state`

    @property
    def longest(self) -> int:
        """Length in tokens at which texts are truncated."""
        return self.chain.max_seq_length or super().longest

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the states of the tokens (B, L, D) and the embeddings (B, D), or the logits (B, C); the inputs are (B, L)."""
        features = {"input_ids": input_ids, "attention_mask": attention_mask}
        states = features["token_embeddings"] = self.model(**features).last_hidden_state.float()
        for module in self.modules_after:
            features = module(features)
        embedding = features[self.result][:, : self.dimension]
        if self.task == CLASSIFICATION:
            return (embedding,)
        if not self.keeps_tokens:
            states = embedding[:, None].expand(-1, input_ids.shape[1], -1)
        return states, embedding


class SearchGraph(Graph):
    """A sparse or a multi-vector model.

    `sparse_embedding` is (B, V): for each token of the vocabulary the maximum, or the sum, of `SpladePooling` over a text.

    `token_embeddings` is (B, L, D). Padding has states of zero, as of torch: a query may be expanded by it. `query_mask` and
    `document_mask`, (B, L) of 0 and 1, are `MultiVectorMask`: the tokens that a score is made of.

    Args:
        chain: The model, on the CPU.
        modules: Those of its modules that read documents.
        query: The module that weighs the tokens of queries without inference, if the model has one.
        task: "sparse-encoder" or "multi-vector".
    """

    def __init__(self, chain: SparseEncoder | MultiVectorEncoder, modules: list, query: nn.Module | None, task: str):
        super().__init__(task, modules[0].model, modules[0].tokenizer)
        self.chain = chain
        self.query = query
        self.modules_after = nn.ModuleList(modules[1:])
        ids_1V = torch.arange(self.model.config.vocab_size)[None]
        every_token = {"input_ids": ids_1V, "attention_mask": torch.ones_like(ids_1V)}
        masks = [module for module in modules if type(module).__name__ == "MultiVectorMask"]
        tables = [mask(dict(every_token), task) for mask in masks for task in ("query", "document")]
        self.counted_V = [table["attention_mask"][0].long() for table in tables]  # 1 for a token that counts, by task

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the weights (B, V), or the vectors (B, L, D) and the masks (B, L); the inputs are (B, L)."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        is_real = attention_mask[..., None].float()
        if self.task == SPARSE:
            pooling = self.modules_after[0]
            logits = found.logits.float() * is_real
            if pooling.pooling_strategy == "max":  # first: the functions keep the order, and have less to compute
                logits = logits.amax(1, keepdim=True)
            weights = logits.relu().log1p()
            if pooling.activation_function == "log1p_relu":
                weights = weights.log1p()
            return (weights.sum(1),)
        vectors = {"token_embeddings": found.last_hidden_state.float() * is_real}
        for module in self.modules_after:
            vectors = module(vectors)  # a mask does nothing without input_ids
        return vectors["token_embeddings"], *(counted_V[input_ids] * attention_mask for counted_V in self.counted_V)


def load_graph(source: str | Path, task: str | None = None) -> Graph:
    """Load a model for the export, in float32 and on the CPU. What it returns is trusted: no file is opened after it.

    Args:
        source: Folder or Hub id of a NeoBERT, or of a model of sentence-transformers.
        task: One of `TASKS`; by default that of the saved model.

    Raises:
        ValueError: The folder holds another kind of model, damaged weights, no head for the task, or what a graph cannot hold.
        OSError: A file is missing or damaged, or the repository cannot be reached.
    """
    if task not in (None, *TASKS):
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}")
    saved = SavedModel(source).check_neobert()
    task = task or TASK_OF.get(saved.kind)
    if task is None:
        found = f"{saved.source} holds a {saved.architecture}, which cannot be exported"
        raise ValueError(f"{found}; give one of these as task: {', '.join(TASKS)}")
    is_chain = task in (EMBEDDING, SPARSE, MULTI_VECTOR) or (saved.is_chain and task == CLASSIFICATION)
    graph = _load_chain(saved, task) if is_chain else _load_model(saved, task)
    if task == CLASSIFICATION and saved.library:
        _keep_scores(graph, saved)
    check_finite(dict(graph.named_parameters()), saved.source)
    graph.saved = saved
    _warn_of_parts(graph, is_chain)
    return graph.float().eval()


def _warn_of_parts(graph: Graph, is_chain: bool) -> None:
    """Warn of what the folder has and the files leave out."""
    saved = graph.saved
    left_out = [] if is_chain else [kind.rpartition(".")[2] for _, kind in saved.modules[1:]]
    model_class = class_of(saved.architecture)
    # the head of a masked language model is one of the pretraining
    if model_class not in (None, type(graph.model), AUTO_CLASSES["AutoModelForMaskedLM"]):
        left_out.append(f"the head of {model_class.__name__}")
    if (saved.folder / "config_setfit.json").is_file() or (saved.folder / "model_head.pkl").is_file():
        left_out.append("the classes of SetFit (model_head.pkl)")
    if left_out:
        logger.warning(
            f"{saved.source} has {printable(', '.join(left_out))}, which the files for {graph.task} leave out"
        )


def _load_model(saved: SavedModel, task: str) -> Graph:
    """Load a NeoBERT with the head of a task."""
    kind, _ = TASKS[task]
    saved.check_head(kind)
    tokenizer = saved.load_tokenizer() if saved.has_tokenizer else None
    with quiet():
        model = AUTO_CLASSES[AUTO_CLASS_OF[kind]].from_pretrained(saved.main, **LOADING)
    keep_known_settings(model.config, saved.source)
    return Graph(task, model, tokenizer)


def _keep_scores(graph: Graph, saved: SavedModel) -> None:
    """Let config.json and the prompt say what sentence-transformers does before and after the logits.

    Raises:
        ValueError: A config.json cannot say it.
    """
    config = graph.model.config
    if saved.settings.get("default_prompt_name"):
        graph.prompts = {name: saved.settings[name] for name in ("prompts", "default_prompt_name")}
    if isinstance(graph, EmbeddingGraph):  # its config is that of the encoder
        config.num_labels = graph.chain.num_labels
    config.problem_type = saved.score_type
    if config.num_labels == 1 and config.problem_type != "regression":
        config.problem_type = None  # by which it is a score and no class


def _load_chain(saved: SavedModel, task: str) -> EmbeddingGraph | SearchGraph:
    """Load a model of sentence-transformers that a graph can hold, or a bare NeoBERT with mean pooling."""
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder

    from ..checkpoints.common_form import SentenceTransformer

    classes = {each.__name__: each for each in (SentenceTransformer, CrossEncoder, SparseEncoder, MultiVectorEncoder)}
    library = saved.library or "SentenceTransformer"
    own = {"CrossEncoder": CLASSIFICATION, "SparseEncoder": SPARSE, "MultiVectorEncoder": MULTI_VECTOR}
    if task != own.get(library, EMBEDDING):
        raise ValueError(f"{saved.source} holds a {library}, which cannot be exported for task={task}; leave out task")
    if task == SPARSE:
        saved.check_head("masked words")
    with quiet():
        chain = classes[library](str(saved.folder), device="cpu", model_kwargs=LOADING)
    modules, query = _modules_of(chain)
    kinds = [type(module).__name__ for module in modules]
    needed = {SPARSE: "SpladePooling", MULTI_VECTOR: "MultiVectorMask"}.get(task, "Pooling")
    further = {SPARSE: set(), MULTI_VECTOR: {"Dense", "Normalize"}}.get(task, {*kinds})
    if kinds.count(needed) != 1 or not {*kinds[1:]} <= {needed, *further}:
        rule = f"only a NeoBERT with one {needed}{', Dense and Normalize' * (task == MULTI_VECTOR)} can be exported"
        raise ValueError(f"{saved.source} has the modules {', '.join(kinds)}; {rule}")
    if "Pooling" in kinds and not chain[kinds.index("Pooling")].include_prompt:
        raise ValueError(
            f"{saved.source} has include_prompt=False, and a graph does not know which tokens are of the prompt; train the model "
            "with include_prompt=True, or set it in the config.json of the pooling if the model has no prompts"
        )
    if modules[0].processing_kwargs:
        raise ValueError(f"{saved.source} has processing_kwargs, which only torch reads; set max_seq_length instead")
    adopt(modules[0], saved.source)
    if task in (SPARSE, MULTI_VECTOR):
        return SearchGraph(chain, modules, query, task)
    return EmbeddingGraph(chain, task)


def _modules_of(chain: nn.Module) -> tuple[list[nn.Module], nn.Module | None]:
    """Return the modules that read documents, and the one that weighs the tokens of queries, of a Router, or None."""
    modules = list(chain)
    routes = getattr(modules[0], "sub_modules", {})
    if {*routes} == {"query", "document"} and type(routes["query"][0]).__name__ == "SparseStaticEmbedding":
        return [*routes["document"], *modules[1:]], routes["query"][0]
    return modules, None
