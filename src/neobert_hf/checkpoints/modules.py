"""The folder of a model of sentence-transformers: its modules and its class, and whether it may be opened."""

import json
from pathlib import Path

from huggingface_hub import snapshot_download

from ..files.json_files import read_json
from .trust import NAMES, check_source, foreign_settings

SETTINGS = "config_sentence_transformers.json"  # of a model, beside modules.json


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return path and type of the modules of a model of sentence-transformers; none for a model alone.

    Raises:
        ValueError: modules.json is damaged.
    """
    file = folder / "modules.json"
    content = read_json(file) if file.is_file() else []
    try:
        if isinstance(content, list):
            return [(module["path"] + "", module["type"] + "") for module in content]
    except (TypeError, KeyError):
        pass
    raise ValueError(f"{file} is no list of modules with path and type; save or download the model again")


def read_kind(folder: Path) -> str | None:
    """Return the class of sentence-transformers that saved a folder; None for a model alone.

    Raises:
        ValueError: config_sentence_transformers.json is damaged.
    """
    content = _read_object(folder / SETTINGS)
    if content is None:
        return "CrossEncoder" if read_activation(folder) else None
    return content.get("model_type") or "SentenceTransformer"  # older versions name none


def read_activation(folder: Path) -> str | None:
    """Return the name of what a cross-encoder computes of its logits, such as "Sigmoid"; None if the folder does not say it.

    sentence-transformers 6 writes it to a file of its own, 4 and 5 into config.json, and 3 there under another name.

    Raises:
        ValueError: One of the files is damaged.
    """
    config = _read_object(folder / "config.json") or {}
    places = [_read_object(folder / SETTINGS), config.get("sentence_transformers")]
    named = [place.get("activation_fn") for place in places if isinstance(place, dict)]
    named.append(config.get("sbert_ce_default_activation_function"))
    return next((str(name).rpartition(".")[2] for name in named if name), None)


def _read_object(file: Path) -> dict | None:
    content = read_json(file) if file.is_file() else None
    if not isinstance(content, dict | None):
        raise ValueError(f"{file} is no JSON object; save or download the model again")
    return content


def check_modules(folder: Path) -> str | None:
    """Refuse a folder for which sentence-transformers would call what a JSON file names, or open a pickle.

    Nothing is loaded. sentence-transformers calls each activation whose name begins with "torch.".

    Returns:
        As of `read_kind`.

    Raises:
        ValueError: A JSON file of the folder or of a module names other code than that of sentence-transformers and torch.nn,
            or is damaged; a module is outside the folder; or its weights are pickled.
    """
    modules = read_modules(folder)
    parts = {folder / path for path, _ in modules} - {folder}
    if any(kind.endswith((".Router", ".Asym")) for _, kind in modules):  # it has modules in further folders
        parts |= {part for part in folder.rglob("*") if part.is_dir()}
    for part in sorted(parts):
        if not part.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"modules.json of {folder} names the module {str(part)!r}, outside its folder; correct it")
    files = {*folder.glob("*.json"), *(file for part in parts for file in part.rglob("*.json"))}
    for file in sorted(files):
        for key, value in foreign_settings(file):
            if key in NAMES:  # without trust_remote_code, no loader runs the others
                raise ValueError(
                    f"{file.relative_to(folder)} of {folder} names {json.dumps(value)} as {key}, which is no code of "
                    "sentence-transformers or torch.nn; remove it, or save the model with their modules only"
                )
    for part in (folder, *sorted(parts)):
        if (pickles := sorted(part.glob("pytorch_model*.bin"))) and not any(part.glob("model.safetensors*")):
            raise ValueError(
                f"{pickles[0]} is a pickle, which is not opened; `neobert convert` writes a model alone as safetensors; if you "
                "trust a module, open the model with SentenceTransformer, and save it with save_pretrained"
            )
    return read_kind(folder)


def check_modules_of(name: str, revision: str | None = None) -> str | None:
    """As `check_modules` for a folder, or for an id, of which the JSON files are downloaded; also `check_source`.

    Raises:
        OSError: The repository cannot be reached.
    """
    check_source(name)
    if not Path(name).is_dir():
        return check_modules(Path(snapshot_download(name, revision=revision, allow_patterns="*.json")))
    return check_modules(Path(name))
