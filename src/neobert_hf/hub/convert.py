"""Convert checkpoints between the layouts of NeoBERT: published, split gate and up, tied decoder, pickles.

The layouts hold the same numbers in another order, so a conversion copies bytes of the source, tensor by tensor. It computes
nothing, changes no bit, and needs the memory of the largest tensor.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.dynamic_module_utils import custom_object_save

from ..files.trust import check_links, holds_tokenizer, keep_known_settings, load_tokenizer, resolve
from ..files.writing import saving
from ..model import modeling_neobert
from ..model.checkpoint_neobert import set_auto_map
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import AUTO_CLASSES, NeoBERTModel, NeoBERTPreTrainedModel
from ..model.weight_files_neobert import canonical_name, check_names
from . import unpickle
from .expected_tensors import stored_sizes
from .layouts import WEIGHTS, Checkpoint, StoredTensor, read_checkpoint, read_config, read_header
from .verify import PASSED_ON

LAYOUTS = ("published", "w1w2")
PICKLES = ("pytorch_model*.bin", "state_dict.pt")  # of a repository on the Hub, beside the data files
HEADS = ("decoder.", "dense.", "classifier.", "qa_outputs.")
# The widest first: in this order each tensor of a file begins at a multiple of its width, as safetensors needs it.
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
FROM_WEIGHTS = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")  # keys of config.json
EMBEDDING = "model.encoder.weight"


class NewTensor(NamedTuple):
    """A tensor to write: its parts one after the other; a number stands for that many zero bytes."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredTensor | int, ...]


def convert(
    source: str | Path, out: str | Path, to: str = "published", base: str | Path | None = None
) -> dict[str, Any]:
    """Write a checkpoint in another layout, with config and tokenizer; in the published layout also with the code.

    Args:
        source: Folder or Hub id. Pickled weights are read with `weights_only=True`, in a process of their own.
        out: Folder to write, new or empty. It appears when it is complete.
        to: `published`, or `w1w2` (see `neobert_hf.hub.layouts.Checkpoint`).
        base: Folder or Hub id of the model from which config and tokenizer come, if the source has none.

    Returns:
        The folder, its layout and the layout of the source, and in `added` what the source lacked.

    Raises:
        ValueError: The source is no NeoBERT or incomplete; the message names the solution. `out` is not empty.
        OSError: A file cannot be read or written.
    """
    if to not in LAYOUTS:
        raise ValueError(f"to={to!r} is no layout that can be written; choose {' or '.join(LAYOUTS)}")
    folder, out = resolve(source, PICKLES), Path(out)
    check_links(folder)
    if (folder / "modules.json").exists():
        raise ValueError(
            f"{folder} holds more than a model, the modules of sentence-transformers; copy config, weights and tokenizer to a "
            "folder of their own, convert that, and copy the result back"
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; choose another one")
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{out} is inside the source, which is never changed; choose another folder")
    base = None if base is None else resolve(base)
    checkpoint, tokenizer_folder = read_checkpoint(folder), find_tokenizer(folder, base)

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as beside:
        layout, built = checkpoint.layout, Path(beside, out.name)
        if layout in ("pickle", "deepspeed"):
            checkpoint = open_pickles(checkpoint, Path(beside, WEIGHTS))
        if base is not None and not checkpoint.config:
            checkpoint = checkpoint._replace(config={**read_config(base), "architectures": None})
        tensors = as_published(checkpoint.tensors)
        model, added = describe_model(checkpoint, tensors)
        tokenizer = load_tokenizer(str(tokenizer_folder), model.config.vocab_size, model.config)
        with saving(out, "nothing is left of it"):
            built.mkdir()
            write_weights(as_w1w2(tensors) if to == "w1w2" else tensors, built / WEIGHTS)
            tokenizer.save_pretrained(built)
            if (folder / "README.md").is_file():
                shutil.copy(folder / "README.md", built)
            save_config(model, built, to)  # last: without it, no tool takes the folder for a model
            if out.exists():
                out.rmdir()
            os.replace(built, out)
    return {"folder": str(out), "from": layout, "to": to, "added": added}


def find_tokenizer(folder: Path, base: Path | None) -> Path:
    """Return the folder of the tokenizer: the source, its folder `tokenizer`, as the fork's training writes it, or `base`."""
    for place in (folder, folder / "tokenizer", *([base] if base else [])):
        if holds_tokenizer(place):
            return place
    raise ValueError(
        f"{folder} holds no tokenizer; copy that of its model there, or name a model that has it in --base"
    )


def open_pickles(checkpoint: Checkpoint, out: Path) -> Checkpoint:
    """Write the weights of pickles to a safetensors file, in another process without tokens, and describe that file.

    Raises:
        OSError: They cannot be read with `weights_only=True`, or they are only a part of the weights.
    """
    first = checkpoint.files[0]
    has_optimizer = any(first.parent.glob("*_optim_states.pt"))
    remedy = (
        "download it again; or, if you trust it, load it where it was trained, and save the weights alone: "
        "torch.save(model.state_dict(), 'state_dict.pt')"
    )
    if checkpoint.layout == "deepspeed":
        remedy = (
            "merge the shards by the script that DeepSpeed writes above the folder of the step: python zero_to_fp32.py . "
            "MERGED --safe_serialization; then convert MERGED"
        )
        if len(checkpoint.files) > 1:
            raise OSError(
                f"{first.parent} holds a shard of the weights in each of {len(checkpoint.files)} files; {remedy}"
            )
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    command = [sys.executable, "-I", unpickle.__file__, *map(str, checkpoint.files), str(out)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    reason = (run.stderr.strip().splitlines() or [f"the process that reads it ended with status {run.returncode}"])[-1]
    if run.returncode == unpickle.UNREADABLE:
        raise OSError(f"{first} cannot be read with weights_only=True ({reason}); {remedy}")
    if run.returncode:
        raise OSError(f"{first} could not be converted ({reason})")
    tensors = read_header(out)
    if checkpoint.layout == "deepspeed" and any(0 in tensor.shape for tensor in tensors.values()):
        raise OSError(f"{first} holds no weights, which are in the shards of ZeRO stage 3; {remedy}")
    if has_optimizer and any(tensor.dtype != "F32" for tensor in tensors.values()):
        raise OSError(f"{first} holds rounded weights, and the weights in float32 are in the shards of ZeRO; {remedy}")
    return checkpoint._replace(tensors=tensors)


def as_published(tensors: dict[str, StoredTensor]) -> dict[str, NewTensor]:
    """Name the tensors as published, and fuse each gate `w1` with its up `w2`.

    Raises:
        ValueError: A tensor exists twice, or gate and up do not fit.
    """
    check_names((name, str(tensor.file)) for name, tensor in tensors.items())
    found = {canonical_name(name): NewTensor(tensor.dtype, tensor.shape, (tensor,)) for name, tensor in tensors.items()}
    for name in [name for name in found if name.endswith(".ffn.w1.weight")]:
        gate, up = found.pop(name), found.pop(name.replace(".w1.", ".w2."), None)
        fused = name.replace(".w1.", ".w12.")
        if up is None or (up.dtype, up.shape) != (gate.dtype, gate.shape) or fused in found:
            raise ValueError(
                f"{name} has no ffn.w2 of its shape, or stands beside {fused}; the checkpoint is incomplete"
            )
        found[fused] = NewTensor(gate.dtype, (2 * gate.shape[0], *gate.shape[1:]), gate.parts + up.parts)
    return found


def as_w1w2(tensors: dict[str, NewTensor]) -> dict[str, NewTensor]:
    """Split each fused tensor `w12` into gate `w1` and up `w2`."""
    split = {}
    for name, tensor in tensors.items():
        if ".ffn.w12." not in name:
            split[name] = tensor
            continue
        parts = tensor.parts
        if len(parts) == 1:
            middle = (parts[0].start + parts[0].end) // 2
            parts = (parts[0]._replace(end=middle), parts[0]._replace(start=middle))
        shape = (tensor.shape[0] // 2, *tensor.shape[1:])
        for new, part in zip(("w1", "w2"), parts):
            split[name.replace("w12", new)] = NewTensor(tensor.dtype, shape, (part,))
    return split


def describe_model(checkpoint: Checkpoint, tensors: dict[str, NewTensor]) -> tuple[NeoBERTPreTrainedModel, list[str]]:
    """Complete the decoder in `tensors` and compare them with the config.

    Returns:
        The model on the device meta, without numbers; and what was added to the tensors, in words.

    Raises:
        ValueError: The config is of another model, or a tensor is missing, unknown or of another shape.
    """
    folder, is_tied = checkpoint.folder, checkpoint.config.get("tie_word_embeddings")
    if is_tied is None and "decoder.weight" not in tensors:
        # The code of the fork ties by default, and transformers 4 does not write this default.
        is_tied = any(".ffn.w1." in name for name in checkpoint.tensors)
    if not checkpoint.config:
        raise ValueError(
            f"{folder} holds no config.json; copy that of its model there, or name a model that has it in --base"
        )
    config = NeoBERTConfig.from_dict(
        {key: value for key, value in checkpoint.config.items() if key not in FROM_WEIGHTS}
    )
    keep_known_settings(config, folder)
    if config.num_hidden_layers != (found := stored_sizes(tensors)["num_hidden_layers"]):
        raise ValueError(
            f"config.json of {folder} gives num_hidden_layers={config.num_hidden_layers}, but its weights have {found} layers; "
            "correct config.json, or download the checkpoint again"
        )
    model_class = find_class(config, tensors)
    added = complete_decoder(tensors, is_tied) if model_class is AUTO_CLASSES["AutoModelForMaskedLM"] else []
    with torch.device("meta"):
        model = model_class(config)
    prefix = "model." if model_class is NeoBERTModel else ""
    shapes = {f"{prefix}{name}": tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if lost := sorted(shapes.keys() - tensors.keys()):
        raise ValueError(
            f"{folder} lacks {len(lost)} tensors of a {model_class.__name__} (first: {lost[0]}); it is incomplete, or its "
            "config.json is another model's"
        )
    if unknown := sorted(name for name in tensors.keys() - shapes.keys() if not name.startswith(HEADS)):
        raise ValueError(
            f"{folder} holds {len(unknown)} tensors that a NeoBERT of its config.json does not have (first: {unknown[0]}); it is "
            "another model, or config.json is"
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} of {folder} has the shape {tensors[name].shape}, but its config.json gives {shape}; correct config.json"
            )
    if other := {tensor.dtype for tensor in tensors.values()} - DTYPES.keys():
        raise ValueError(f"{folder} holds weights of the type {min(other)}; convert the model before it is quantized")
    config.dtype, config.architectures = DTYPES[tensors[EMBEDDING].dtype], [model_class.__name__]
    return model, added


def find_class(config: NeoBERTConfig, tensors: dict[str, NewTensor]) -> type[NeoBERTPreTrainedModel]:
    """Return the class that the config names, otherwise that of the head in the weights."""
    if config.architectures:
        model_class = getattr(modeling_neobert, str(config.architectures[0]), None)
        if not (isinstance(model_class, type) and issubclass(model_class, NeoBERTPreTrainedModel)):
            raise ValueError(f"architectures={config.architectures} is no class of NeoBERT; correct config.json")
        return model_class
    if "classifier.weight" in tensors:
        config.num_labels = tensors["classifier.weight"].shape[0]
        return AUTO_CLASSES["AutoModelForSequenceClassification"]
    return AUTO_CLASSES["AutoModelForMaskedLM" if "decoder.weight" in tensors else "AutoModel"]


def complete_decoder(tensors: dict[str, NewTensor], is_tied: bool | None) -> list[str]:
    """Write a tied decoder out as an own one, and a missing bias as zeros; return what was added, in words.

    Args:
        tensors: Tensors by published name; changed.
        is_tied: Whether the decoder is the embedding; None if it is not known, and the decoder is there.

    Raises:
        ValueError: The config says that the decoder is tied, but it has numbers of its own.
    """
    if EMBEDDING not in tensors:
        return []
    embedding, decoder, added = tensors[EMBEDDING], tensors.get("decoder.weight"), []
    if decoder is None and is_tied:
        tensors["decoder.weight"] = decoder = embedding
        added.append("decoder.weight: the embedding, to which it was tied")
    elif is_tied and not np.array_equal(_read(*embedding.parts), _read(*decoder.parts)):
        raise ValueError(
            "tie_word_embeddings=True, but decoder.weight is not the embedding; set it to false in config.json to keep the "
            "decoder, or remove decoder.weight"
        )
    if decoder is not None and "decoder.bias" not in tensors:
        (part,), shape = decoder.parts, decoder.shape[:1]
        num_bytes = (part.end - part.start) // math.prod(decoder.shape[1:])
        tensors["decoder.bias"] = NewTensor(decoder.dtype, shape, (num_bytes,))
        added.append("decoder.bias: zeros")
    return added


def write_weights(tensors: dict[str, NewTensor], file: Path) -> None:
    """Write a safetensors file, one tensor after the other; safetensors itself needs all of them in memory."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    ordered = sorted(tensors.items(), key=lambda item: (list(DTYPES).index(item[1].dtype), item[0]))
    for name, (dtype, shape, parts) in ordered:
        start, end = end, end + sum(part if isinstance(part, int) else part.end - part.start for part in parts)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for part in tensor.parts:
                stream.write(bytes(part) if isinstance(part, int) else _read(part))
    read_header(file)  # refuses a file that is too short


def _read(tensor):
    """The bytes of a stored tensor."""
    return np.fromfile(tensor.file, np.uint8, tensor.end - tensor.start, offset=tensor.start)


def save_config(model: NeoBERTPreTrainedModel, folder: Path, layout: str) -> None:
    """Write the code and config.json as `save_pretrained` does; our code does not read the layout w1w2, so not beside that."""
    if layout == "published":
        custom_object_save(NeoBERTModel, folder)
        set_auto_map(model, model.auto_classes)
        return model.config.save_pretrained(folder)
    content = model.config.to_dict() | {
        "max_length": model.config.max_position_embeddings,
        "tie_word_embeddings": False,
    }
    content.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True), "utf-8")
