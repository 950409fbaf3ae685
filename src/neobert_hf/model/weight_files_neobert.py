"""Which weight files are read: safetensors only, inside the folder, undamaged. It imports no torch."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError


def check_weight_files(
    source: str | os.PathLike, subfolder: str | None, use_safetensors: bool | None, weights_only: bool
) -> None:
    """Refuse pickled weights, which can execute any code when they are loaded, and weight files outside the folder.

    Only a local folder is checked: the files of a Hub id are unknown before the download. For those, `weights_only=True`, the
    default, restricts torch's unpickling to tensors.

    Args:
        source: Folder or Hub id, as given to `from_pretrained`.
        subfolder: Folder inside `source`.
        use_safetensors: As given to `from_pretrained`.
        weights_only: As given to `from_pretrained`.

    Raises:
        ValueError: `use_safetensors=False` or `weights_only=False` is given; both allow pickles.
        OSError: The folder has pickled weights and no safetensors file; an index cannot be read; or the index or the config
            names a weight file that is not a safetensors file inside the folder.
    """
    if use_safetensors is not None and not use_safetensors:
        raise ValueError(
            f"use_safetensors={use_safetensors} requests pickled weights, which can execute any code when loaded; "
            "omit it and load a checkpoint in safetensors"
        )
    if not weights_only:
        raise ValueError(
            f"weights_only={weights_only} lets a pickle execute any code; omit it and load a checkpoint in safetensors"
        )
    folder = os.path.join(source or "", subfolder or "")
    if not os.path.isdir(folder):
        return
    files = sorted(os.listdir(folder))
    pickles = [name for name in files if "model" in name and name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles and not any(name.endswith(".safetensors") for name in files):
        raise OSError(
            f"{folder} contains {pickles[0]} and no safetensors file; a pickle can execute any code and is never loaded: "
            f"convert it, which runs nothing of it: neobert convert {source} DST"
        )
    for name in files:
        if ".index." in name and name.endswith(".json"):  # the name of a variant is between ".index." and ".json"
            read_index(os.path.join(folder, name))
    config = os.path.join(folder, "config.json")
    if os.path.isfile(config):
        with open(config, "rb") as stream:
            named = re.search(rb'"transformers_weights"\s*:\s*(?!null)', stream.read())
        if named:
            raise OSError(
                f"{config} names other weight files in transformers_weights; remove this key, they are never read"
            )


def read_index(file: str | os.PathLike) -> dict[str, str]:
    """Return the names of the weight files, by tensor, from an index of safetensors files.

    Raises:
        OSError: The index is damaged, or names a file that is not a safetensors file inside its folder.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            weight_map = json.load(stream)["weight_map"]
        shards = set(weight_map.values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise OSError(f"{file} is not a valid weight index ({error}); download or copy it again") from error
    for name in shards:
        is_inside = (
            isinstance(name, str) and not re.match(r"[\\/]|[A-Za-z]:", name) and ".." not in re.split(r"[\\/]", name)
        )
        if not is_inside or not name.endswith(".safetensors"):
            raise OSError(f"{file} names {name!r} as a weight file; only .safetensors files inside its folder are read")
    return weight_map


@contextmanager
def explain_damaged_file(source: str | os.PathLike, remedy: str = "download or copy it again") -> Iterator[None]:
    """Convert a SafetensorError into an OSError that names `source` and the solution."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"the safetensors file of {source} cannot be read ({error}); it is truncated or damaged: {remedy}"
        ) from error
