"""What a folder of weights is: its layout, and the place of each tensor, from file names and safetensors headers only.

Nothing is built and no weights are read, so a folder of any size takes milliseconds. A pickle is recognised and not opened.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from ..files.trust import read_json
from ..model.weight_files_neobert import check_names, explain_damaged_file, read_index

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Without a safetensors file: names of pickled weights, of PyTorch, of the published training code, and of DeepSpeed.
PICKLE = re.compile(r"(state_dict|.*model.*)\.(bin|pt|pth|ckpt)")
DEEPSPEED = "*_model_states.pt"


class StoredTensor(NamedTuple):
    """Where a tensor lies: bytes `start` to `end` of `file`, row by row; `dtype` as safetensors names it, such as F32."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


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
        tensors: Place of each tensor, by its name in the file; empty for pickles.
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
    files = _safetensors_files(folder)
    if files:
        headers = [read_header(file) for file in files]
        check_names((name, str(tensor.file)) for header in headers for name, tensor in header.items())
        tensors = {name: tensor for header in headers for name, tensor in header.items()}
        return Checkpoint(folder, _layout(config, tensors), config, tensors, files)
    pickles = sorted(
        file
        for file in folder.glob("*")
        if PICKLE.fullmatch(file.name) and not file.match(DEEPSPEED) and file.is_file()
    )
    if pickles:
        return Checkpoint(folder, "pickle", config, {}, tuple(pickles))
    states = _deepspeed_files(folder)
    if not states and (shards := sorted(file.name for file in folder.glob("*.safetensors"))):
        raise OSError(f"{folder} holds {shards[0]}, and {INDEX}, which names the files, is missing; download it too")
    if not states:
        raise OSError(
            f"{folder} holds no weights; give a folder with {WEIGHTS}, {INDEX}, pytorch_model.bin, state_dict.pt, or the "
            f"{DEEPSPEED} of DeepSpeed"
        )
    return Checkpoint(folder, "deepspeed", config, {}, states)


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
    """Return the tensors of a safetensors file.

    Raises:
        OSError: The file is truncated, or its header is damaged. Damaged numbers are not seen: the format has no checksum.
    """
    with explain_damaged_file(file), safe_open(file, "np"):  # checks the header against the size of the file
        pass
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    first = 8 + size
    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), file, *(first + end for end in entry["data_offsets"]))
        for name, entry in header.items()
    }


def _safetensors_files(folder):
    """The files that transformers reads: the single file, otherwise those of the index."""
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    if not (folder / INDEX).is_file():
        return ()
    weight_map = read_index(folder / INDEX)
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    for file in files:
        if not file.is_file():
            raise OSError(
                f"{folder / INDEX} names {file.name}, which is missing; download or copy the checkpoint again"
            )
        held = read_header(file).keys()
        lost = sorted(name for name, shard in weight_map.items() if shard == file.name and name not in held)
        if lost:
            raise OSError(
                f"{folder / INDEX} names {len(lost)} tensors that {file.name} lacks (first: {lost[0]}); download or copy the "
                "checkpoint again"
            )
    return files


def _deepspeed_files(folder):
    """The model states of DeepSpeed: in the folder of a step, in that of accelerate, or in the last step."""
    steps = [folder, folder / "pytorch_model"]
    if (folder / "latest").is_file():
        steps.append(folder / Path((folder / "latest").read_text("utf-8", "replace").strip()).name)
    return next((found for step in steps if (found := tuple(sorted(step.glob(DEEPSPEED))))), ())


def _layout(config, tensors):
    if "encoder_init_range" in config:  # of the keys in config.json, only NeoDictaBERT has this one
        return "neodictabert"
    if any(".ffn.w12." in name for name in tensors):
        return "published"
    return "w1w2" if any(".ffn.w1." in name for name in tensors) else "other"
