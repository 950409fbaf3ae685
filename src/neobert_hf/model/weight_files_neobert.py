"""Which weight files are read: safetensors only, inside the folder, undamaged, each tensor once. It imports no torch."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


def check_weight_files(
    source: str | os.PathLike | None,
    options: dict[str, Any],
) -> None:
    """Refuse pickled weights, which can execute any code when they are loaded, and weight files outside the folder.

    `source` and `options` are the arguments of `from_pretrained`. Only a local folder is searched: the files of a Hub id are
    unknown before the download.

    Raises:
        ValueError: `use_safetensors=False` or `weights_only=False` requests pickles.
        OSError: The folder has pickled weights and no safetensors, or it names a weight file that is not one inside it.
    """
    for name in ("use_safetensors", "weights_only"):
        if options.get(name) is not None and not options[name]:
            raise ValueError(
                f"{name}={options[name]} requests pickled weights, which can execute any code when loaded; omit it and load a "
                "checkpoint in safetensors"
            )
    folder = Path(source or "", options.get("subfolder") or "")
    files: list[Path] = []
    if source and folder.is_dir():
        files = sorted(file for file in folder.iterdir() if file.is_file())  # reading a pipe would wait for ever
    pickles = [file for file in files if "model" in file.name and file.suffix in (".bin", ".pt", ".pth", ".ckpt")]
    if pickles and not any(file.suffix == ".safetensors" for file in files):
        raise OSError(
            f"{pickles[0]} is a pickle, which can execute any code and is never loaded, and the folder has no safetensors file; "
            f"convert it, which runs nothing of it: neobert convert {source} DST"
        )
    for file in files:
        if ".index." in file.name and file.suffix == ".json":
            read_index(file)
            if "metadata" not in json.loads(file.read_text("utf-8")):
                raise OSError(f'{file} has no "metadata", which transformers requires; add "metadata": {{}} to it')
        if file.name == "config.json" and re.search(rb'"transformers_weights"\s*:\s*(?!null)', file.read_bytes()):
            raise OSError(
                f"{file} names other weight files in transformers_weights; remove this key, they are never read"
            )


def read_index(file: str | os.PathLike) -> dict[str, str]:
    """Return the names of the weight files, by tensor, from an index of safetensors files.

    Raises:
        OSError: The index is damaged, or names a file that is not a safetensors file inside its folder.
    """
    try:
        weight_map = json.loads(Path(file).read_text("utf-8"))["weight_map"]
        shards = set(weight_map.values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise OSError(f"{file} is not a valid weight index ({error}); download or copy it again") from error
    for name in shards:
        if not isinstance(name, str) or not re.fullmatch(r"(?s)(?!/)(?!.*\.\.)[^\\:]+\.safetensors", name):
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

    Raises:
        ValueError: Two of the names in `stored`, each with its file, are those of one tensor.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, file in stored:
        other, other_file = found.setdefault(canonical_name(name), (name, file))
        if (other, other_file) != (name, file):
            raise ValueError(
                f"{file} holds {name}, which is the same tensor as {other} of {other_file}; remove one of them, or rename it if "
                "a class of yours holds both"
            )


def stored_names(
    source: str | os.PathLike | None,
    options: dict[str, Any],
) -> Iterator[tuple[str, str]]:
    """Name the tensors that `from_pretrained` reads from a local folder, each with its file.

    `source` and `options` are its arguments. None are named of a Hub id, or of a folder that holds an adapter only.
    """
    if source is None or options.get("state_dict") is not None:
        return
    folder = Path(source, options.get("subfolder") or "")
    variant = f".{options['variant']}" if options.get("variant") else ""
    index = folder / f"model.safetensors.index{variant}.json"
    files = [folder / f"model{variant}.safetensors"]
    if not files[0].exists() and index.exists():
        files = [folder / name for name in sorted(set(read_index(index).values()))]
    for file in files:
        if file.exists():
            with safe_open(file, "np") as tensors:
                yield from ((name, str(file)) for name in tensors.keys())  # noqa: SIM118  (it is no dict)


@contextmanager
def explain_damaged_file(
    source: str | os.PathLike,
    remedy: str = "download or copy it again",
) -> Iterator[None]:
    """Convert a SafetensorError into an OSError that names `source` and the solution."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"the safetensors file of {source} cannot be read ({error}); it is truncated or damaged: {remedy}"
        ) from error
