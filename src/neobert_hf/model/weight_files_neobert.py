"""Which weight files are read: safetensors only, inside the folder, undamaged, each tensor once. It imports no torch."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open


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
        file = os.path.join(folder, name)
        # The name of a variant is between ".index." and ".json". Reading a pipe would wait for ever.
        if ".index." in name and name.endswith(".json") and os.path.isfile(file):
            read_index(file)
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


def canonical_name(name: str) -> str:
    """Return the published name of a tensor: without the prefixes of wrappers, with that of the encoder."""
    name = re.sub(r"^(module\.)+", "", name.replace("_orig_mod.", ""))  # torch.compile; DDP and DeepSpeed
    if re.match(r"(encoder|transformer_encoder|layer_norm)\.", name):  # saved from the encoder alone
        return f"model.{name}"
    return re.sub(r"^model\.(?=(decoder|dense|classifier|qa_outputs)\.)", "", name)


def check_names(stored: Iterable[tuple[str, str]]) -> None:
    """Refuse a checkpoint that holds a tensor twice, under one name or two; transformers would load one of them.

    Args:
        stored: The name of each stored tensor, and its file.

    Raises:
        ValueError: A tensor is stored twice.
    """
    found = {}
    for name, file in stored:
        other, other_file = found.setdefault(canonical_name(name), (name, file))
        if (other, other_file) != (name, file):
            place = "" if file == other_file else f" of {other_file}"
            raise ValueError(
                f"{file} holds {name}, which is the same tensor as {other}{place}; remove one of them, or rename it if a "
                "class of yours holds both"
            )


def stored_names(source: str | os.PathLike | None, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name the tensors that `from_pretrained` has loaded from files, each with its file.

    Args:
        source: Folder or Hub id, as given to `from_pretrained`; None if the weights are given in `options`.
        options: The keyword arguments of `from_pretrained`.
    """
    if source is None or options.get("state_dict") is not None:
        return
    variant = f".{options['variant']}" if options.get("variant") else ""
    single, index = f"model{variant}.safetensors", f"model.safetensors.index{variant}.json"
    if file := _find_file(source, single, options):
        names = [file]
    elif file := _find_file(source, index, options):
        names = [os.path.join(os.path.dirname(file), name) for name in sorted(set(read_index(file).values()))]
    else:
        return  # transformers has found them elsewhere: the base model of an adapter
    for file in names:
        with safe_open(file, "np") as tensors:
            yield from ((name, file) for name in tensors.keys())  # noqa: SIM118  (it is no dict)


def _find_file(source, name, options):
    """The path of a file of a folder, or of a repository in the cache; None if there is none."""
    name = os.path.join(options.get("subfolder") or "", name)
    if os.path.isdir(source):
        file = os.path.join(source, name)
        return file if os.path.isfile(file) else None
    file = try_to_load_from_cache(str(source), name, options.get("cache_dir"), options.get("revision"))
    return file if isinstance(file, str) else None


@contextmanager
def explain_damaged_file(source: str | os.PathLike, remedy: str = "download or copy it again") -> Iterator[None]:
    """Convert a SafetensorError, or the KeyError of an index, into an OSError that names `source` and the solution."""
    try:
        yield
    except KeyError as error:
        if error.args != ("metadata",):
            raise
        raise OSError(
            f'the index of {source} has no "metadata", which transformers requires; add "metadata": {{}} to it'
        ) from error
    except SafetensorError as error:
        raise OSError(
            f"the safetensors file of {source} cannot be read ({error}); it is truncated or damaged: {remedy}"
        ) from error
