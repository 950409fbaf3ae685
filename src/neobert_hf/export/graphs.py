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

from ..checkpoints.embedding_models import adopt, has_head
from ..checkpoints.layouts import check_weights, class_of, quiet, read_config
from ..checkpoints.modules import SETTINGS, check_modules, read_activation, read_modules
from ..checkpoints.trust import check_links, holds_tokenizer, keep_known_settings, load_tokenizer, resolve
from ..files.json_files import read_json
from ..files.terminal import printable
from ..model.modeling_neobert import AUTO_CLASSES, NeoBERTPreTrainedModel

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

logger = get_logger(__name__)

EMBEDDING, CLASSIFICATION = "sentence-similarity", "text-classification"
SPARSE, MULTI_VECTOR = "sparse-encoder", "multi-vector"
# Tasks as the Hub names them, the last two by a tag: the Auto class of the model, and the outputs of the graph.
TASKS = {
    "feature-extraction": ("AutoModel", ("last_hidden_state",)),
    "fill-mask": ("AutoModelForMaskedLM", ("logits",)),
    CLASSIFICATION: ("AutoModelForSequenceClassification", ("logits",)),
    "token-classification": ("AutoModelForTokenClassification", ("logits",)),
    "question-answering": ("AutoModelForQuestionAnswering", ("start_logits", "end_logits")),
    EMBEDDING: ("AutoModel", ("last_hidden_state", "sentence_embedding")),
    SPARSE: ("AutoModelForMaskedLM", ("sparse_embedding",)),
    MULTI_VECTOR: ("AutoModel", ("token_embeddings", "query_mask", "document_mask")),
}
LOADING = {"dtype": torch.float32, "ignore_mismatched_sizes": True}  # `check_weights` refuses such sizes in one line


class Graph(nn.Module):
    """A model, and the outputs that an exported file computes.

    Attributes:
        task: One of `TASKS`.
        outputs: Names of the outputs.
        model: The NeoBERT.
        tokenizer: Its tokenizer, or None if the folder has none.
        prompts: What the folder says of the prompt before each text of a classifier; empty if it has none.
        origin: Folder or Hub id from which it was loaded, and the folder.
    """

    origin: tuple[str, Path]

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

    The only output of a model that ends with a layer of classes, and of a reranker, is its logits (B, C).

    Args:
        chain: The embedding model or the reranker, on the CPU.
        task: "sentence-similarity", or "text-classification" for a classifier and a reranker.
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
    folder = resolve(source)
    check_links(folder)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter; merge it into its model and export that: "
            "open_adapter(MODEL_CLASS, FOLDER).merge_and_unload().save_pretrained(OUT)"
        )
    kind = check_modules(folder) or "SentenceTransformer"
    modules = [kind.rpartition(".")[2] for _, kind in read_modules(folder)]
    names = read_config(folder).get("architectures") or [None]
    saved = class_of(names)
    is_chain = bool(modules[kind == "CrossEncoder" :])  # the model of a CrossEncoder may have its head
    if task in (EMBEDDING, SPARSE, MULTI_VECTOR) or (is_chain and task in (None, CLASSIFICATION)):
        graph, modules = _load_chain(folder, kind, task), []
    else:
        graph = _load_model(folder, task or _task_of(saved, names[0], folder))
    if graph.task == CLASSIFICATION and (is_chain or kind == "CrossEncoder"):
        _keep_scores(graph, folder, kind)
    check_weights(graph.model, folder, graph.task, graph)
    graph.origin = str(source), folder
    left_out = modules[1:]
    # the head of a masked language model is one of the pretraining
    if saved not in (None, type(graph.model), AUTO_CLASSES["AutoModelForMaskedLM"]):
        left_out.append(f"the head of {saved.__name__}")
    if (folder / "config_setfit.json").is_file() or (folder / "model_head.pkl").is_file():
        left_out.append("the classes of SetFit (model_head.pkl)")
    if left_out:
        logger.warning(f"{source} has {printable(', '.join(left_out))}, which the files for {graph.task} leave out")
    return graph.float().eval()


def _task_of(model_class: type[NeoBERTPreTrainedModel] | None, name: str | None, folder: Path) -> str:
    """The task of the class that config.json names."""
    for task, (auto_class, _) in TASKS.items():
        if model_class is AUTO_CLASSES[auto_class]:
            return task
    raise ValueError(
        f"{folder} has no config.json of a NeoBERT that can be exported, it names {name}; give the folder of a saved model, "
        f"or one of these as task: {', '.join(TASKS)}"
    )


def _load_model(folder: Path, task: str) -> Graph:
    """Load a NeoBERT with the head of a task."""
    tokenizer = load_tokenizer(str(folder)) if holds_tokenizer(folder) else None
    with quiet():  # transformers reports a head that is missing, and so does `check_weights`
        model = AUTO_CLASSES[TASKS[task][0]].from_pretrained(folder, **LOADING)
    keep_known_settings(model.config, folder)
    return Graph(task, model, tokenizer)


def _keep_scores(graph: Graph, folder: Path, kind: str) -> None:
    """Let config.json and the prompt say what sentence-transformers does before and after the logits.

    Raises:
        ValueError: A config.json cannot say it.
    """
    config, file = graph.model.config, folder / SETTINGS
    settings = read_json(file) if file.is_file() else {}
    if settings.get("default_prompt_name"):
        graph.prompts = {name: settings[name] for name in ("prompts", "default_prompt_name")}
    if kind != "CrossEncoder":
        config.problem_type = "single_label_classification"
        return
    if isinstance(graph, EmbeddingGraph):  # its config is that of the encoder
        config.num_labels, config.problem_type = graph.chain.num_labels, None
    name = str(read_activation(folder))
    types = {"None": None, "Sigmoid": None, "Identity": "regression"}  # whose scores are the logits
    if config.num_labels > 1:
        types |= {
            "Sigmoid": "multi_label_classification",
            "Softmax": "single_label_classification",
            "None": "regression",
        }
    if name not in types:
        raise ValueError(
            f"{folder} makes scores of logits by {printable(name)}, which config.json cannot say; set activation_fn in "
            f"{SETTINGS} to torch.nn.Identity, and apply {printable(name)} to the results"
        )
    config.problem_type = types[name]


def _load_chain(folder: Path, kind: str, task: str | None) -> EmbeddingGraph | SearchGraph:
    """Load a model of sentence-transformers that a graph can hold, or a bare NeoBERT with mean pooling."""
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder

    from ..checkpoints.common_form import SentenceTransformer

    classes = {each.__name__: each for each in (SentenceTransformer, CrossEncoder, SparseEncoder, MultiVectorEncoder)}
    only = {"CrossEncoder": CLASSIFICATION, "SparseEncoder": SPARSE, "MultiVectorEncoder": MULTI_VECTOR}.get(kind)
    if kind not in classes or (task not in (None, only) if only else task in (SPARSE, MULTI_VECTOR)):
        remedy = "leave out task" if kind in classes else f"give a {', '.join(classes)}, or a NeoBERT with its own head"
        raise ValueError(f"{folder} holds a {printable(str(kind))}, which cannot be exported for task={task}; {remedy}")
    with quiet():
        chain = classes[kind](str(folder), device="cpu", model_kwargs=LOADING)
    modules, query, routes = list(chain), None, getattr(chain[0], "sub_modules", {})  # of a Router
    if {*routes} == {"query", "document"} and type(routes["query"][0]).__name__ == "SparseStaticEmbedding":
        modules, query = [*routes["document"], *modules[1:]], routes["query"][0]
    kinds = [type(module).__name__ for module in modules]
    model_type = getattr(getattr(modules[0], "config", None), "model_type", kinds[0])
    needed = {SPARSE: "SpladePooling", MULTI_VECTOR: "MultiVectorMask"}.get(only or "", "Pooling")
    further = {SPARSE: set(), MULTI_VECTOR: {"Dense", "Normalize"}}.get(only or "", {*kinds})
    if model_type != "neobert" or kinds.count(needed) != 1 or not {*kinds[1:]} <= {needed, *further}:
        rule = f"only a NeoBERT with one {needed}{', Dense and Normalize' * (only == MULTI_VECTOR)} can be exported"
        raise ValueError(f"{folder} begins with {model_type} and has the modules {', '.join(kinds)}; {rule}")
    if "Pooling" in kinds and not chain[kinds.index("Pooling")].include_prompt:
        raise ValueError(
            f"{folder} has include_prompt=False, and a graph does not know which tokens are of the prompt; train the model with "
            "include_prompt=True, or set it in the config.json of the pooling if the model has no prompts"
        )
    if modules[0].processing_kwargs:
        raise ValueError(f"{folder} has processing_kwargs, which only torch reads; set max_seq_length instead")
    has_classes = kind == "CrossEncoder" or has_head(chain)
    if task == CLASSIFICATION and not has_classes:
        raise ValueError(f"{folder} holds an embedding model without classes; leave out task, or export a classifier")
    adopt(modules[0], folder)
    if only in (SPARSE, MULTI_VECTOR):
        return SearchGraph(chain, modules, query, only)
    return EmbeddingGraph(chain, task or (CLASSIFICATION if has_classes else EMBEDDING))
