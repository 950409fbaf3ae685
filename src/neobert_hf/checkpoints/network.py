"""The weights of a NeoBERT compared with its config: names, shapes and types, from the headers of files or from tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from ..model import modeling_neobert
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import AUTO_CLASSES, NeoBERTPreTrainedModel
from ..model.weight_files_neobert import canonical_name, explain_damaged_file

# The types of trained weights, as safetensors and torch name them.
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
BLOCK = re.compile(r"model\.transformer_encoder\.(\d+)\.(.+)")
# The Auto class that opens the network of a kind.
AUTO_CLASS_OF = {
    "encoder": "AutoModel",
    "masked words": "AutoModelForMaskedLM",
    "classes": "AutoModelForSequenceClassification",
    "tags": "AutoModelForTokenClassification",
    "spans": "AutoModelForQuestionAnswering",
    "choices": "AutoModelForMultipleChoice",
    "vector": "AutoModel",
    "sparse": "AutoModelForMaskedLM",
    "multi-vector": "AutoModel",
}
OF_HEADS = ("decoder.", "dense.", "classifier.", "qa_outputs.")


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file; `dtype` as safetensors names it, such as F32, and `name` as the file has it."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    name: str

    def read(self) -> torch.Tensor:
        """Return its numbers, of `shape`."""
        with safe_open(self.file, "pt") as stream:
            return stream.get_tensor(self.name)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    Raises:
        OSError: The file is truncated, or its header is damaged. Damaged numbers are not seen: the format has no checksum.
    """
    found = {}
    with explain_damaged_file(file), safe_open(file, "pt") as stream:
        for name in stream.keys():  # noqa: SIM118  (it is no dict)
            part = stream.get_slice(name)
            found[name] = StoredTensor(part.get_dtype(), tuple(part.get_shape()), file, name)
    return found


def count_parameters(folder: Path) -> tuple[int, str]:
    """Return the number of parameters of a folder with its modules, and the dtype of the first one, from the headers."""
    files = (*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("[0-9]*_*/*.safetensors")))
    tensors = [tensor for file in files for tensor in read_header(file).values()]
    dtype = tensors[0].dtype if tensors else ""
    return sum(math.prod(tensor.shape) for tensor in tensors), FLOATS.get(dtype, dtype)


def expected_tensors(config: NeoBERTConfig, kind: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a kind of model by their published names; those of one block are those of all."""
    small = copy(config)
    small.num_hidden_layers = 1
    with torch.device("meta"):
        model = AUTO_CLASSES[AUTO_CLASS_OF[kind]](small)
    found = {}
    for name, tensor in model.state_dict().items():
        for number in range(config.num_hidden_layers if ".0." in name else 1):
            found[canonical_name(name).replace(".0.", f".{number}.")] = tuple(tensor.shape)
    return found


def check_encoder(config: NeoBERTConfig, tensors: Mapping[str, Any], source: str | Path) -> None:
    """Refuse an encoder that is not that of the config, and integers.

    Args:
        config: The config.
        tensors: Tensors of torch or stored ones, by their published names.
        source: Their folder, for messages.

    Raises:
        ValueError: As said.
    """
    given = config.num_hidden_layers
    numbers = {found[1] for found in map(BLOCK.match, tensors) if found}
    if given != len(numbers):  # such a model would take for ever to make
        found = f"config.json of {source} gives num_hidden_layers={given}, but its weights have {len(numbers)}"
        raise ValueError(f"{found}; correct config.json, or download the checkpoint again")
    for name, shape in expected_tensors(config, "encoder").items():
        fault = ""
        if name not in tensors:
            fault = f"lacks {name}"
        elif tuple(tensors[name].shape) != shape:
            fault = f"has {name} of the shape {tuple(tensors[name].shape)}, where config.json gives {shape}"
        if fault:
            remedy = "it is incomplete, or config.json is that of another model; download or copy it again"
            raise ValueError(f"{source} {fault}; {remedy}")
    known = {*FLOATS, *(f"torch.{name}" for name in FLOATS.values())}
    other = {str(tensor.dtype) for tensor in tensors.values()} - known
    if other:
        raise ValueError(f"{source} holds weights of the type {min(other)}; convert the model before it is quantized")


def lost_layers(config: NeoBERTConfig, tensors: Mapping[str, Any], kind: str) -> list[str]:
    """Return the layers of a kind of model that are not there in the shapes of the config; arguments as of `check_encoder`."""
    lost = set()
    for name, shape in expected_tensors(config, kind).items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            lost.add(name.rpartition(".")[0])
    return sorted(lost)


def unknown_tensors(config: NeoBERTConfig, tensors: Mapping[str, Any], kind: str) -> list[str]:
    """Return the tensors that neither this kind of model nor another head has; arguments as of `check_encoder`."""
    known = expected_tensors(config, kind)
    return [name for name in sorted(tensors) if name not in known and not name.startswith(OF_HEADS)]


def check_finite(tensors: Mapping[str, Any], source: str | Path) -> None:
    """Refuse tensors with NaN or infinity.

    Args:
        tensors: Tensors of torch, or stored ones, by their names.
        source: Their folder, for the message.

    Raises:
        ValueError: A tensor has such a number.
    """
    for name, tensor in tensors.items():
        values = tensor.read() if isinstance(tensor, StoredTensor) else tensor
        if not values.isfinite().all():
            doctor = f"neobert doctor {source} lists all that is wrong with it"
            raise ValueError(f"{source} has NaN or infinity in {name.replace('model.model.', 'model.', 1)}; {doctor}")


def class_of(architecture: str) -> type[NeoBERTPreTrainedModel] | None:
    """Return the class of this library of a name, which may be the published one; None for others."""
    found = getattr(modeling_neobert, architecture, None)
    is_class = isinstance(found, type) and issubclass(found, NeoBERTPreTrainedModel)
    return found if is_class and found is not NeoBERTPreTrainedModel else None
