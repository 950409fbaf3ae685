"""What a checkpoint must be before NeoBERT loads it: safetensors, and a whole encoder; and who loads what is saved."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError


def check_weight_files(
    source: str | os.PathLike, subfolder: str | None, use_safetensors: bool | None, weights_only: bool
) -> None:
    """Refuse pickled weights, which can run any code when they are read, and files outside of the folder.

    The files of a Hub id are known after the download only. Without `weights_only=False`, torch unpickles tensors of them and
    nothing else.

    Args:
        source: Folder or Hub id that `from_pretrained` was given.
        subfolder: Folder inside `source`.
        use_safetensors: As given to `from_pretrained`.
        weights_only: As given to `from_pretrained`.

    Raises:
        ValueError: `use_safetensors=False` or `weights_only=False` asks for a pickle.
        OSError: The folder holds a pickle and no safetensors, or an index names a file that is no safetensors file inside the
            folder, or cannot be read.
    """
    if use_safetensors is not None and not use_safetensors:
        raise ValueError(
            f"use_safetensors={use_safetensors} asks for pickled weights, which can run any code when read; "
            "leave it out and load a checkpoint in safetensors"
        )
    if not weights_only:
        raise ValueError(
            f"weights_only={weights_only} lets a pickle run any code when read; leave it out and load a checkpoint in safetensors"
        )
    folder = os.path.join(source or "", subfolder or "")
    if not os.path.isdir(folder):
        return
    files = sorted(os.listdir(folder))
    pickles = [name for name in files if "model" in name and name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles and not any(name.endswith(".safetensors") for name in files):
        raise OSError(
            f"{folder} holds {pickles[0]} and no safetensors; a pickle can run any code when read and is never loaded: "
            "where you trust it, convert it with safetensors.torch.save_file(torch.load(file, weights_only=True), "
            "'model.safetensors', metadata={'format': 'pt'})"
        )
    for name in files:
        if ".index." in name and name.endswith(".json"):  # a variant stands between the two
            _check_index(os.path.join(folder, name))
    config = os.path.join(folder, "config.json")
    if os.path.isfile(config):
        with open(config, "rb") as stream:
            named = re.search(rb'"transformers_weights"\s*:\s*(?!null)', stream.read())
        if named:
            raise OSError(f"{config} names other files of weights in transformers_weights; remove it, none is read")


def _check_index(file):
    try:
        with open(file, encoding="utf-8") as stream:
            shards = set(json.load(stream)["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise OSError(f"{file} is no index of weights ({error}); download or copy it again") from error
    for name in shards:
        is_inside = (
            isinstance(name, str) and not re.match(r"[\\/]|[A-Za-z]:", name) and ".." not in re.split(r"[\\/]", name)
        )
        if not is_inside or not name.endswith(".safetensors"):
            raise OSError(
                f"{file} names {name!r} as a file of weights; only .safetensors files inside its folder are read"
            )


@contextmanager
def explain_damaged_file(source: str | os.PathLike) -> Iterator[None]:
    """Raise OSError with the way out where safetensors cannot read a file of `source`."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"the safetensors file of {source} cannot be read ({error}); it is truncated or damaged: download or copy it again"
        ) from error


def check_encoder_is_complete(model, missing: set[str], unexpected: set[str]) -> None:
    """Refuse a model whose encoder, or half of a head (weight or bias), was not in the checkpoint. A whole head may be new.

    Args:
        model: The loaded model.
        missing: Names of its parameters that the checkpoint lacks.
        unexpected: Names in the checkpoint that the model lacks.

    Raises:
        ValueError: Names the first missing tensor and the way out.
    """
    prefix, source = f"{model.base_model_prefix}.", model.config.name_or_path
    encoder = {name for name, _ in model.base_model.named_parameters()}
    lost = sorted(name for name in missing if name.removeprefix(prefix) in encoder)
    if lost:
        hint = "this is not a NeoBERT checkpoint, or not a whole one"
        if any(".ffn.w1." in name for name in unexpected):
            hint = "gate and up are stored apart as ffn.w1 and ffn.w2: store torch.cat((w1, w2)) as ffn.w12.weight"
        raise ValueError(f"{source} lacks {len(lost)} tensors of the encoder, {lost[0]} the first; {hint}")
    if "decoder.weight" in missing and "decoder.bias" not in missing:
        raise ValueError(
            f"{source} has decoder.bias but no decoder.weight, so its decoder was tied to the embedding; NeoBERT's is "
            "not: store a copy of model.encoder.weight as decoder.weight"
        )
    parameters = {name for name, _ in model.named_parameters()}
    for name in sorted(missing & parameters):
        twin = name.removesuffix("weight") + "bias" if name.endswith("weight") else name.removesuffix("bias") + "weight"
        if twin in parameters - missing:
            raise ValueError(f"{source} has {twin} but no {name}, so half of a head is lost; copy the checkpoint again")


def set_auto_map(model, auto_classes: dict[str, type]) -> None:
    """Name in the config, for every Auto class, the file and the class that load the model from its saved folder."""
    model.config.auto_map = {
        auto_class: f"{loaded.__module__.rsplit('.', 1)[-1]}.{loaded.__name__}"
        for auto_class, loaded in auto_classes.items()
    }
    if any(base.__name__ == "FSDPModule" for base in type(model).__mro__):
        # FSDP2 has made a class around the model's own. transformers would save PyTorch's file, and name it, in its place.
        type(model)._auto_class = None
