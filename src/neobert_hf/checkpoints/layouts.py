"""What a folder of weights is: its layout, its tensors and their shapes, from file names and safetensors headers only.

No weights are read, so a folder of any size takes milliseconds. A pickle is recognised and not opened.
"""

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from ..files.json_files import read_json
from ..model import modeling_neobert
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import NeoBERTPreTrainedModel
from ..model.weight_files_neobert import check_names, explain_damaged_file, read_index

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Without a safetensors file: names of pickled weights, of PyTorch, of the published training code, and of DeepSpeed.
PICKLE = re.compile(r"(state_dict|.*model.*)\.(bin|pt|pth|ckpt)")
DEEPSPEED = "*_model_states.pt"
# The types of trained weights, as safetensors names them.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BLOCK = re.compile(r"model\.transformer_encoder\.(\d+)\.(.+)")


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


class Checkpoint(NamedTuple):
    """A folder of weights.

    Attributes:
        folder: The folder.
        layout: One of

            - `published`: gate and up fused as `ffn.w12`, as in `chandar-lab/NeoBERT` and in all that this library writes;
            - `w1w2`: gate `ffn.w1`, up `ffn.w2` and output `ffn.w3`, as in the fork `pszemraj/NeoBERT`, and in xformers with
              unpacked weights;
            - `neodictabert`: another model of the type "neobert";
            - `pickle`: pickled weights; `deepspeed`: the states of a training with DeepSpeed;
            - `other`: tensors of another model.
        config: Content of config.json; empty if there is none.
        tensors: The tensors by their names in the files; empty for pickles.
        files: The files that hold the weights.
    """

    folder: Path
    layout: str
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Describe a folder of weights.

    Raises:
        ValueError: Its config.json is damaged, or a tensor is stored twice.
        OSError: It holds no weights, a file is damaged, or an index names a file that is missing or outside the folder.
    """
    config = read_config(folder)
    if files := _safetensors_files(folder):
        stored = [tensor for file in files for tensor in read_header(file).values()]
        check_names((tensor.name, str(tensor.file)) for tensor in stored)
        tensors = {tensor.name: tensor for tensor in stored}
        return Checkpoint(folder, _layout(config, tensors), config, tensors, files)
    named = [file for file in sorted(folder.glob("*")) if PICKLE.fullmatch(file.name) and file.is_file()]
    if pickles := tuple(file for file in named if not file.match(DEEPSPEED)):
        return Checkpoint(folder, "pickle", config, {}, pickles)
    if states := _deepspeed_files(folder):
        return Checkpoint(folder, "deepspeed", config, {}, states)
    if shards := sorted(file.name for file in folder.glob("*.safetensors")):
        raise OSError(f"{folder} holds {shards[0]}, and {INDEX}, which names the files, is missing; download it too")
    raise OSError(
        f"{folder} holds no weights; give a folder with {WEIGHTS}, {INDEX}, pytorch_model.bin, state_dict.pt, or the "
        f"{DEEPSPEED} of DeepSpeed"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, empty if there is none.

    Raises:
        ValueError: It is damaged.
    """
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a JSON object; download or copy it again")
    return config


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    Raises:
        OSError: The file is truncated, or its header is damaged. Damaged numbers are not seen: the format has no checksum.
    """
    with explain_damaged_file(file), safe_open(file, "pt") as stream:
        slices = {name: stream.get_slice(name) for name in stream.keys()}  # noqa: SIM118  (it is no dict)
        return {name: StoredTensor(s.get_dtype(), tuple(s.get_shape()), file, name) for name, s in slices.items()}


def stored_sizes(tensors: Mapping[str, StoredTensor | torch.Tensor]) -> dict[str, int]:
    """Return the sizes of a model as its tensors have them, by the names in the config.

    Args:
        tensors: Tensors by their published names.
    """
    sizes = {}
    embedding = tensors.get("model.encoder.weight")
    if embedding is not None and len(embedding.shape) == 2:
        sizes["vocab_size"], sizes["hidden_size"] = embedding.shape
    last = max((int(found[1]) for name in tensors if (found := BLOCK.fullmatch(name))), default=-1)
    sizes["num_hidden_layers"] = min(1 + last, len(tensors))  # the number in a name may be any
    widths = [each.shape[1] for name, each in tensors.items() if name.endswith(".ffn.w3.weight") and each.shape[1:]]
    if widths:
        sizes["swiglu_width"] = max(set(widths), key=widths.count)
    return sizes


def check_sizes(config: NeoBERTConfig, tensors: Mapping[str, StoredTensor | torch.Tensor], folder: str | Path) -> None:
    """Refuse tensors of another size than the config gives, or of integers.

    Args:
        config: The config.
        tensors: Tensors by their published names.
        folder: Their folder, for messages.

    Raises:
        ValueError: A size differs, or a type is not one of trained weights.
    """
    for name, found in stored_sizes(tensors).items():
        if (given := getattr(config, name)) != found:
            of = f" (of intermediate_size={3 * found // 2})" if name == "swiglu_width" else ""
            raise ValueError(
                f"config.json of {folder} gives {name}={given}, but its weights have {found}{of}; correct config.json, or "
                "download the checkpoint again"
            )
    if other := {str(tensor.dtype) for tensor in tensors.values()} - {*FLOATS, *map(str, FLOATS.values())}:
        raise ValueError(f"{folder} holds weights of the type {min(other)}; convert the model before it is quantized")


def class_of(architectures: list[str] | None) -> type[NeoBERTPreTrainedModel] | None:
    """Return the class of this library that a config names first, under its own name or the published one; None for others."""
    names = architectures if isinstance(architectures, list) else []
    found = getattr(modeling_neobert, str(next(iter(names), "")), None)
    is_class = isinstance(found, type) and issubclass(found, NeoBERTPreTrainedModel)
    return found if is_class and found is not NeoBERTPreTrainedModel else None


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


def check_weights(
    model: NeoBERTPreTrainedModel, source: str | Path, purpose: str, whole: nn.Module | None = None
) -> None:
    """Refuse a loaded model that is not what its files hold, or has numbers that are not finite.

    Args:
        model: The model, loaded with `ignore_mismatched_sizes=True`, so that another shape is reported here.
        source: Its folder or id, for messages.
        purpose: What its head is for, for messages.
        whole: The module that holds it and others, whose numbers are judged too; by default the model alone.

    Raises:
        ValueError: The files lack a head or have it in another shape, have more layers than the config, NaN or infinity.
    """
    doctor = f"neobert doctor {source} lists all that is wrong with it"
    if lost := sorted(model.new_layers):
        raise ValueError(
            f"{source} lacks {', '.join(lost[:3])}{' and more' * (len(lost) > 3)} in the shapes of config.json: the head for "
            f"{purpose} was never trained, or config.json is that of another model; {doctor}"
        )
    if more := sorted(name for name in model.unused_tensors if "transformer_encoder." in name):
        blocks = model.config.num_hidden_layers
        raise ValueError(f"{source} has num_hidden_layers={blocks}, and further tensors such as {more[0]}; {doctor}")
    for name, values in (whole or model).named_parameters():
        if not values.isfinite().all():
            raise ValueError(f"{source} has NaN or infinity in {name.replace('model.model.', 'model.', 1)}; {doctor}")


def _safetensors_files(folder):
    """The files that transformers reads: the single file, otherwise those of the index."""
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    names = set(read_index(folder / INDEX).values()) if (folder / INDEX).is_file() else ()
    if lost := [name for name in names if not (folder / name).is_file()]:
        raise OSError(f"{folder / INDEX} names {lost[0]}, which is missing; download or copy the checkpoint again")
    return tuple(folder / name for name in sorted(names))


def _deepspeed_files(folder):
    """The model states of DeepSpeed: in the folder of a step, in that of accelerate, or in the last step."""
    steps = [folder, folder / "pytorch_model"]
    if (folder / "latest").is_file():
        last = Path((folder / "latest").read_text("utf-8", "replace").strip()).name
        steps += [step for step in folder.iterdir() if step.name == last]  # never "..", which is outside
    return next((found for step in steps if (found := tuple(sorted(step.glob(DEEPSPEED))))), ())


def _layout(config, tensors):
    if "encoder_init_range" in config:  # of the keys in config.json, only NeoDictaBERT has this one
        return "neodictabert"
    if any(".ffn.w12." in name for name in tensors):
        return "published"
    return "w1w2" if any(".ffn.w1." in name for name in tensors) else "other"
