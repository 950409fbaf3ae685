"""What a folder or a Hub id of other people may bring: its own files, and settings that name no code of another place.

It imports neither torch nor transformers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files.json_files import read_json

# Files of a repository on the Hub that are read: no code, no pickles.
DATA_FILES = ("*.json", "*.txt", "*.safetensors", "*.jinja", "*.model")
TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model")
CODE = Path(__file__).resolve().parents[1] / "model"  # in a clone, the mini model has links to this code
# Settings whose values sentence-transformers imports and calls, and the names of its own code, torch's and transformers' (words).
MODULES, ACTIVATIONS = r"sentence_transformers(\.\w+)+", r"\w*|torch\.nn(\.\w+)+|sentence_transformers(\.\w+)+"
NAMES = {
    "type": MODULES,  # in modules.json
    "types": MODULES,  # of Router and Asym, beside "structure"
    "tokenizer_class": r"\w*|" + MODULES,
    "activation_function": ACTIVATIONS,  # of Dense
    "activation_fn": ACTIVATIONS,  # of CrossEncoder
    "sbert_ce_default_activation_function": ACTIVATIONS,
}
# Settings by which transformers runs code of the Hub: a pipeline of any name, a kernel such as org/name.
KERNELS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
ALLOWED = {**NAMES, **dict.fromkeys(KERNELS, "[^/]*"), "custom_pipelines": "(?!)"}


def check_source(source: str | Path) -> None:
    """Raise ValueError if a source is neither a folder nor an id of the Hub, or if `check_links` refuses the folder."""
    folder = Path(source)
    if folder.is_dir():
        check_links(folder)
    elif folder.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise ValueError(f"{source} is no folder; give an existing folder, or an id on the Hub such as org/name")


def resolve(source: str | Path, more: Iterable[str] = (), revision: str | None = None) -> Path:
    """Return a folder as it is, unchecked, or the folder of a Hub id, whose data files are downloaded.

    Args:
        source: Folder or Hub id.
        more: Patterns of further files to download: code (`*.py`) or pickles, which this library never runs or opens unasked.
        revision: Branch, tag or commit on the Hub.

    Raises:
        ValueError: It is neither a folder nor an id.
        OSError: The repository cannot be reached.
    """
    if Path(source).is_dir():
        return Path(source)
    check_source(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=[*DATA_FILES, *more]))
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"{source} cannot be downloaded ({reason}); check the id, the network and your token") from error


def check_links(folder: Path) -> None:
    """Refuse files of a folder that are elsewhere, or no regular files.

    What is saved after loading the folder, or uploaded, would contain files of another place. Reading a pipe waits for ever. The
    links of the Hub's cache, which keeps files beside the folder of a revision, and those to our own code are accepted.

    Raises:
        ValueError: A symbolic link leaves the folder, tokenizer_config.json names a file outside it, or a file is not regular: a
            pipe, a socket or a device.
    """
    roots = [folder.resolve(), CODE]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parents[1] / "blobs")
    files = sorted(folder.rglob("*"))
    for file in files:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ValueError(f"{file} is a pipe, a socket or a device, not a regular file; remove it")
    references = [(file, file) for file in files if file.is_symlink()]
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and isinstance(content := read_json(settings), dict):  # transformers 4 opens these files
        paths = (folder / value for value in content.values() if isinstance(value, str) and 0 < len(value) < 4096)
        references += [(settings, path) for path in paths if path.is_file()]
    for file, target in references:
        if not any(target.resolve().is_relative_to(root) for root in roots):
            found = f"{file} refers to {target.resolve()}, outside its folder"
            raise ValueError(f"{found}; a copy of the model would publish it; to do that, replace the link by the file")


def foreign_settings(file: Path) -> Iterator[tuple[str, Any]]:
    """Return the settings of a JSON file by which transformers or sentence-transformers would run code of another place."""
    content = read_json(file)
    is_judged = dict.fromkeys(ALLOWED, True) | {"auto_map": True}
    is_judged["type"] = file.name == "modules.json"
    is_judged["types"] = isinstance(content, dict) and "structure" in content
    for node in nodes(content):
        for key, value in node.items() if isinstance(node, dict) else ():
            if is_judged.get(key) and not all(is_own(key, name, file.parent) for name in nodes(value)):
                yield key, value


def is_own(key: str, name: Any, folder: Path) -> bool:
    """Whether a setting names code of the folder, or of a known library; what is no text names none."""
    if not isinstance(name, str):
        return True
    if key != "auto_map":
        return bool(re.fullmatch(ALLOWED[key], name))
    found = re.fullmatch(r"(\w+)\.\w+", name)  # a class in a file, such as "modeling_neobert.NeoBERTModel"
    return found is not None and (folder / f"{found[1]}.py").is_file()


def nodes(content: Any) -> Iterator[Any]:
    """All parts of JSON content at any depth, a part before those inside of it."""
    yield content
    for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from nodes(part)


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any(file.is_file() for name in TOKENIZER_FILES for file in folder.glob(name))


def check_vocabulary(words: Mapping[str, int], num_special: int, source: str | Path, vocab_size: int | None) -> None:
    """Refuse the tokenizer of another model, and the one without words that transformers makes if the files are missing.

    A model may have up to twice as many embeddings as its tokenizer has tokens: vocabularies are often padded.

    Args:
        words: Ids of the tokens.
        num_special: Number of special tokens among them.
        source: Folder of the tokenizer, for messages.
        vocab_size: Number of embeddings; None if it is unknown.

    Raises:
        ValueError: As said.
    """
    found = f"the tokenizer of {source} has {len(words)}"
    if len(words) <= num_special:
        raise ValueError(f"{found} special tokens and no word; its files are missing: add tokenizer.json")
    largest = max(words.values())
    if vocab_size is not None and not (vocab_size / 2 <= len(words) and largest < vocab_size):
        fault = f"tokens, but the model has {vocab_size}, and the largest id is {largest}"
        raise ValueError(f"{found} {fault}; give the tokenizer of this model")
