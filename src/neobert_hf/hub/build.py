"""Build the folder that goes to the Hub: weights, config, tokenizer, modules of sentence-transformers, model code and card."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, PreTrainedModel

from ..files.trust import (
    NAMES,
    check_source,
    foreign_settings,
    keep_known_settings,
    load_tokenizer,
    read_json,
    resolve,
)
from ..files.writing import saving, write_json
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import AUTO_CLASSES
from ..runs.record import RECORD
from .card import CARD, write_card
from .layouts import class_of, read_config

if TYPE_CHECKING:
    from sentence_transformers.base.model import BaseModel

KINDS = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder")
# What a folder that is replaced may hold: files of a published model.
REPLACEABLE = (
    *(
        "*.safetensors",
        "*.index.json",
        "*config*.json",
        "*token*.json",
        "vocab.*",
        "*.model",
        "*.jinja",
        "*_neobert.py",
    ),
    *("modules.json", "README.md", "training.json", ".gitattributes"),
)


def build(
    model: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    model_id: str | None = None,
    license: str | None = None,
    language: list[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the Hub folder and return its path; it appears when it is complete.

    Args:
        model: Checkpoint to publish: a folder, or an id on the Hub.
        out: Folder to write, new or empty.
        tokenizer: Folder or Hub id of the tokenizer, if it is not in the folder of the model.
        model_id: Name on the Hub, for the card's example; by default that of `out`.
        license: Licence, for the card; by default that of the model's card.
        language: Languages, for the card, such as en; by default those of the model's card.
        overwrite: Replace `out` with its card, if it is the folder of a model with nothing else in it.

    Raises:
        ValueError: The folder holds other files, the checkpoint is not a NeoBERT or more than one, its tokenizer is not its own,
            a link leaves its folder, or the name is not valid on the Hub.
        OSError: The model or its tokenizer cannot be read, or the folder cannot be written.
    """
    out = Path(out).resolve()  # of "folder/.." the name would be that of another folder
    check_target(out, overwrite)
    if model_id is not None:
        validate_repo_id(model_id)
    check_source(model)
    folder = resolve(model)
    network, dtype = load_model(folder, str(model)), AutoConfig.from_pretrained(folder).dtype
    embedder = load_embedder(folder, str(model))
    loaded_tokenizer = load_tokenizer(str(tokenizer or folder), network.config.vocab_size)

    out.parent.mkdir(parents=True, exist_ok=True)
    with saving(out), tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as beside:
        built, before = Path(beside, "new"), Path(beside, "old")
        if embedder is not None:
            embedder[0].to(network.dtype)  # other modules stay in float32: their stored numbers may need it
            embedder.save_pretrained(str(built), create_model_card=False)
        if embedder is None or type(embedder[0].model) is not type(network):  # it lacks the head of a masked model
            network.save_pretrained(built)
        loaded_tokenizer.save_pretrained(built)
        config, name = read_json(built / "config.json"), str(dtype).removeprefix("torch.")
        if dtype is not None and config.get("dtype") != name:  # it is loaded in another dtype than the stored one
            write_json(built / "config.json", config | {"dtype": name})
        options = {"model_id": model_id or out.name, "license": license, "language": language}
        write_card_of_build(folder, str(model), built, **options)
        if out.exists():
            os.replace(out, before)  # removed with the temporary folder
        try:
            os.replace(built, out)
        except OSError:
            if before.exists():
                os.replace(before, out)
            raise
    return out


def write_card_of_build(folder: Path, source: str, built: Path, **options: Any) -> None:
    """Write the card from the record of the training; licence and language are by default those of the model's own card."""
    if (folder / RECORD).is_file():
        shutil.copy(folder / RECORD, built)
    try:
        is_folder = Path(source).is_dir()
        known = ModelCard.load(folder / CARD if is_folder else source, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        known = {}
    if not options["license"] and isinstance(known.get("license"), str):
        options["license"] = known["license"]
    if not options["language"] and isinstance(known.get("language"), (str, list)):
        options["language"] = [known["language"]] if isinstance(known["language"], str) else known["language"]
    write_card(built, **options)
    (built / RECORD).unlink(missing_ok=True)  # it has the names of your files


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse a folder that is not empty; with `overwrite` one that is not that of a model, or holds anything else.

    Raises:
        ValueError: It is such a folder, or a file.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    files = sorted(file for file in out.rglob("*") if not file.is_dir()) if out.is_dir() else [out]
    other = [file for file in files if not any(file.match(pattern) for pattern in REPLACEABLE)]
    hidden = [file for file in files if any(part.startswith(".") for part in file.relative_to(out).parts[:-1])]
    if not overwrite or not (out / "config.json").is_file() or other or hidden:
        kept = (other or hidden or files or [out])[0]
        raise ValueError(
            f"{out} exists and holds {kept.name}; choose another folder"
            + (", since --overwrite replaces only the folder of a model" if overwrite else ", or give --overwrite")
        )


def load_model(folder: Path, source: str) -> PreTrainedModel:
    """Load a checkpoint to publish, in the class that its config names and the dtype in which it is stored.

    Args:
        folder: Its folder.
        source: Its name, for messages.

    Raises:
        ValueError: It is not a NeoBERT, or is an adapter.
        OSError: It cannot be read.
    """
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{source} holds an adapter; merge it into its model (PEFT's merge_and_unload), save the model, and build from "
            "that folder"
        )
    stored = read_config(folder)  # the class of another model may refuse this config before its type is known
    names, kind = stored.get("architectures") or ["NeoBERTForMaskedLM"], stored.get("model_type")
    model_class = class_of(names)
    if kind != NeoBERTConfig.model_type or model_class is None:
        name = names[0] if isinstance(names, list) else names
        classes = ", ".join(other.__name__ for other in AUTO_CLASSES.values() if other is not NeoBERTConfig)
        raise ValueError(
            f"{source} holds a {name} of the type {kind}, which is no NeoBERT; choose a checkpoint of {classes}"
        )
    config = AutoConfig.from_pretrained(folder)
    config.dtype = None  # so that "auto" is the dtype of the file
    model = model_class.from_pretrained(folder, config=config, dtype="auto")
    keep_known_settings(model.config, source)
    return model


def load_embedder(folder: Path, source: str) -> BaseModel | None:
    """Load a model of sentence-transformers in float32 with all of its modules; None if the folder holds a model alone.

    Raises:
        ValueError: A module is not one of sentence-transformers, or the tokenizer is not that of the model.
        OSError: It cannot be read.
    """
    if not (folder / "modules.json").exists():
        return None
    import sentence_transformers

    from ..embeddings.models import adopt, open_embedding_model

    try:
        paths = [
            module["path"] for module in read_json(folder / "modules.json") if "/" + module["type"] + module["path"]
        ]
    except (TypeError, KeyError) as error:
        raise ValueError(f"modules.json of {source} is no list of modules with path and type") from error
    parts = [folder / path for path in paths if path]
    files = [file for file in sorted(folder.rglob("*.json")) if any(file.is_relative_to(part) for part in parts)]
    for file in (folder / "modules.json", *files):
        for key, value in foreign_settings(file):
            if key in NAMES:  # a build writes its own auto_map
                raise ValueError(
                    f"{file.relative_to(folder)} of {source} names {json.dumps(value)} as {key}, which is no code of "
                    "sentence-transformers or torch; remove it, or save the model with their modules only"
                )
    settings = folder / "config_sentence_transformers.json"
    kind = read_json(settings).get("model_type") if settings.is_file() else None
    options = {"model_kwargs": {"dtype": "float32"}}
    if kind in (None, "SentenceTransformer"):
        return open_embedding_model(str(folder), **options)
    if kind not in KINDS:
        raise ValueError(f"{source} holds a {kind}, which is not one of {', '.join(KINDS)}")
    model = getattr(sentence_transformers, kind)(str(folder), **options)
    adopt(model[0], source)
    return model
