"""A model as a EuroBERT: transformers 5.3 and later, and what is built on it, run it without code of this library."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from transformers import (
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertForTokenClassification,
    EuroBertModel,
)

from ..files.trust import resolve
from ..files.writing import replacing
from ..hub.card import CARD, write_card
from ..hub.eurobert import as_eurobert, settings_of
from ..hub.layouts import FLOATS, WEIGHTS, quiet, read_config, read_header
from ..runs.record import CARD_WRITER
from .graphs import CLASSIFICATION, EMBEDDING, LOADING, TASKS, EmbeddingGraph, Graph
from .onnx_model import Arrays
from .parity import Reference

CLASSES = {
    "feature-extraction": EuroBertModel,
    "fill-mask": EuroBertForMaskedLM,
    "token-classification": EuroBertForTokenClassification,
    EMBEDDING: EuroBertModel,
}


def write_eurobert(reference: Reference, folder: Path, source: str | Path) -> dict:
    """Write a model as a EuroBERT, with tokenizer, modules of an embedding model, and card; compare it with torch.

    The weights keep the dtype in which the source stores them. They are compared in float32.

    Args:
        reference: What torch computes. Its graph loses the model, so that the memory holds one.
        folder: Folder to fill.
        source: Folder or Hub id of the model, for the dtype and the card.

    Returns:
        Size in bytes and largest errors of the weights, as of `export_model`.

    Raises:
        ValueError: EuroBERT has no such head or rotary positions, or differs from torch.
        OSError: A file cannot be written.
    """
    graph, origin = reference.graph, resolve(source)
    config, (stored, loaded) = config_of(graph), _dtypes(origin)
    prefix = "model." if CLASSES[graph.task] is EuroBertModel else ""
    published = {f"{prefix}{name}": tensor.to(stored) for name, tensor in graph.model.state_dict().items()}
    tensors = as_eurobert(published, config.num_attention_heads)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
    if graph.tokenizer is not None:
        graph.tokenizer.save_pretrained(folder)
    del published, tensors
    graph.model = None
    if isinstance(graph, EmbeddingGraph):
        with quiet():
            graph.chain[0].model = EuroBertModel.from_pretrained(folder, dtype=stored)
        graph.chain.save(str(folder), create_model_card=False)
        graph.chain[0].model = None
    config.dtype = loaded
    config.save_pretrained(folder)
    found = {"bytes": (folder / WEIGHTS).stat().st_size}
    found |= reference.check(folder / WEIGHTS, _runner(graph, folder), "float32")
    if graph.tokenizer is not None:
        _write_card(source, origin, folder)
    return found


def config_of(graph: Graph) -> EuroBertConfig:
    """The config of the twin, or the refusal of a head that transformers has not for EuroBERT."""
    if graph.task == CLASSIFICATION:
        raise ValueError(
            "the head of EuroBERT for classes has GELU where this one has tanh or none; export to ONNX, or the encoder "
            "alone: task=feature-extraction"
        )
    if graph.task not in CLASSES:
        raise ValueError(
            f"transformers has no EuroBERT for {graph.task}; export to ONNX, or the encoder alone: "
            "task=feature-extraction"
        )
    config, tokenizer = graph.model.config, graph.tokenizer
    mask_id = getattr(tokenizer, "mask_token_id", None)
    return EuroBertConfig(
        **settings_of(config),
        bos_token_id=getattr(tokenizer, "bos_token_id", None),  # as Trainer would set them
        eos_token_id=getattr(tokenizer, "eos_token_id", None),
        # The default is an id of EuroBERT's own vocabulary. Without a mask token, it is an id that exists.
        mask_token_id=(config.pad_token_id or 0) if mask_id is None else mask_id,
        architectures=[CLASSES[graph.task].__name__],
    )


def _dtypes(folder: Path) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the tensors in the files of a model, and the one in which its config.json asks to load it.

    The first is float32 for several, for float64 and for pickles. The second may be wider: the mini model is stored in bfloat16.
    """
    place = folder if (folder / "config.json").is_file() else folder / "0_Transformer"
    stored = [tensor for file in sorted(place.glob("*.safetensors")) for tensor in read_header(file).values()]
    kinds = {tensor.dtype for tensor in stored}
    dtype, config = FLOATS[kinds.pop()] if kinds in ({"BF16"}, {"F16"}) else torch.float32, read_config(place)
    names = {str(each).removeprefix("torch."): each for each in FLOATS.values()}
    return dtype, names.get(config.get("dtype") or config.get("torch_dtype"), dtype)


def _runner(graph: Graph, folder: Path):
    """Open the written folder as a user does, and return what computes the outputs of the graph."""
    with quiet():
        if isinstance(graph, EmbeddingGraph):
            twin = EmbeddingGraph(type(graph.chain)(str(folder), device="cpu", model_kwargs=LOADING), graph.task)
        else:
            twin = Graph(graph.task, CLASSES[graph.task].from_pretrained(folder, **LOADING), graph.tokenizer)
    twin.float().eval()

    def run(batch: Arrays) -> Arrays:
        with torch.inference_mode():
            found = twin(**{name: torch.from_numpy(values) for name, values in batch.items()})
        return {name: values.numpy() for name, values in zip(TASKS[graph.task][1], found)}

    return run


def _write_card(source: str | Path, origin: Path, folder: Path) -> None:
    """Write the card of the twin, with licence and language of the model, and its id on the Hub as the base model."""
    is_local = Path(source).is_dir()
    try:
        known = ModelCard.load(origin / CARD if is_local else str(source), ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, yaml.YAMLError):  # none, or damaged: the new card says what is not known
        known = {}
    with replacing(folder / CARD, writer=CARD_WRITER):  # whose later call may replace it
        write_card(folder, folder.name, known.get("license"), known.get("language"), record_folder=origin)
        card = ModelCard.load(folder / CARD)
        card.data.tags = ["neobert", *card.data.tags]
        if not is_local:
            card.data.base_model, card.data.base_model_relation = str(source), "finetune"
        what = "A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)) in the layout of EuroBERT: the same numbers, "
        what += "read by transformers 5.3 and later without remote code."
        card.text = card.text.replace("## How to use", f"{what}\n\n## How to use", 1)
        card.save(folder / CARD)
