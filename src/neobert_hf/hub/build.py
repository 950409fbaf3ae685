"""Build a folder for the Hub: weights, config, tokenizer, modules of sentence-transformers, model code and model card.

python hub_upload/build.py --model DIR_OR_ID --out HUB_DIR [--model_id org/name] [--license ID] [--language en] [--overwrite]
python hub_upload/push.py HUB_DIR org/name
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from ..files.trust import (
    NAMES,
    check_source,
    foreign_settings,
    keep_known_settings,
    load_tokenizer,
    read_json,
    resolve,
)
from ..files.writing import file_hash, saving, write_json
from ..model import modeling_neobert
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import AUTO_CLASSES
from ..runs.card_files import CARD, check_metadata, editing_card, is_edited, read_card, seal_of
from ..runs.cards import CardFacts, write_card
from ..runs.commands import CommandParser, run_command
from ..runs.folders import SUMMARY
from .layouts import read_config

if TYPE_CHECKING:
    from sentence_transformers.base.model import BaseModel

logger = logging.get_logger(__name__)

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors")
RECORD = ".neobert_build.json"  # the hash of each file that the last build wrote
OTHERS = ("modules.json", "adapter_config.json")  # files that make a folder of weights more than a model
USAGE = "\n## How to use\n"  # a section of each card of `write_card`
KINDS = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder")


@dataclass
class BuildArguments:
    """Sources and target of the build."""

    model: str = field(metadata={"help": "Checkpoint to publish: a folder, or an id on the Hub."})
    out: str = field(metadata={"help": "Folder to write: a new or empty one, or that of an earlier build."})
    tokenizer: str = field(default=None, metadata={"help": "Tokenizer, if it is not in the folder of the model."})
    model_id: str = field(default=None, metadata={"help": "Name on the Hub, for the card's example. Default: --out."})
    license: str = field(default=None, metadata={"help": "Licence, for the card. Default: that of the model's card."})
    language: list[str] = field(
        default=None, metadata={"help": "Languages, for the card, such as en. Default: those of the model's card."}
    )
    overwrite: bool = field(
        default=False,
        metadata={"help": "Replace the model in --out, whatever wrote it. A README.md that was edited stays."},
    )


def build(arguments: BuildArguments) -> Path:
    """Write the Hub folder and return its path; an incomplete folder has no `config.json`, so that it cannot be loaded.

    Raises:
        ValueError: The folder holds other files, the checkpoint is not a NeoBERT or more than one, its tokenizer is not its own,
            a link leaves its folder, or the name, the licence or the language is not valid on the Hub.
        OSError: The model or its tokenizer cannot be read, or the folder cannot be written.
    """
    out = Path(arguments.out).resolve()  # of "folder/.." the name would be that of another folder
    check_target(out, arguments.overwrite)
    check_metadata(arguments.license, arguments.language, arguments.model_id)
    check_source(arguments.model)
    folder = resolve(arguments.model)
    model, dtype = load_model(folder, arguments.model), AutoConfig.from_pretrained(folder).dtype
    embedder = load_embedder(folder, arguments.model)
    tokenizer = load_tokenizer(arguments.tokenizer or str(folder), model.config.vocab_size)
    facts = CardFacts(
        arguments.model, arguments.model_id or out.name, arguments.license, arguments.language, is_copy=True
    )

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as beside:
        built = Path(beside, out.name)
        with saving(out):
            if embedder is not None:
                embedder[0].to(model.dtype)  # other modules stay in float32: their stored numbers may need it
                embedder.save_pretrained(str(built), create_model_card=False)
                embedder[0].float()  # for the example of the card
            if embedder is None or type(embedder[0].model) is not type(model):  # it lacks the head of a masked model
                model.save_pretrained(built)
            tokenizer.save_pretrained(built)
            if dtype not in (None, model.dtype):  # in which it is loaded, which may be another than the stored one
                config = read_json(built / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
                write_json(built / "config.json", config)
            if not copy_card(folder, built, arguments):
                write_card(built, facts, embedder)
            if is_edited(out):
                logger.warning(
                    f"{out / CARD} is not as it was written here, so it stays; move it away to get a new card"
                )
                (built / CARD).unlink()
            record = {file.relative_to(built).as_posix(): file_hash(file) for file in files_of(built)}
            (built / RECORD).write_text(json.dumps(record, indent=1), "utf-8")
        present = {file.relative_to(out).as_posix() for file in files_of(out)}  # a record may name files elsewhere
        move_files(built, out, last="config.json", stale=present & read_record(out).keys() - record.keys() - {CARD})
    return out


def copy_card(folder: Path, built: Path, arguments: BuildArguments) -> bool:
    """Copy a card of ours that a person edited, or that has other sections than `write_card` gives it, as that of the mini model.

    The latter gets the name, the licence and the language of the build, and keeps its seal. Files that it names come with it.

    Returns:
        False if the model has no such card.
    """
    text = read_card(str(folder))
    if seal_of(text) is None or (not is_edited(folder) and USAGE in text):
        return False
    shutil.copy(folder / CARD, built)
    if is_edited(folder):
        logger.warning(f"{folder / CARD} was edited, so it is copied as it is")
        return True
    for name in ("sources.json", SUMMARY):
        if (folder / name).is_file():
            shutil.copy(folder / name, built)
    with editing_card(built / CARD) as card:
        card.text = card.text.replace(f'"{folder.name}"', json.dumps(arguments.model_id or Path(arguments.out).name))
        for name in ("license", "language"):
            setattr(card.data, name, getattr(arguments, name) or getattr(card.data, name))
    return True


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
    name, kind = (stored.get("architectures") or ["NeoBERTForMaskedLM"])[0], stored.get("model_type")
    model_class = getattr(modeling_neobert, str(name), None)
    if kind != NeoBERTConfig.model_type or model_class not in AUTO_CLASSES.values():
        raise ValueError(
            f"{source} holds a {name} of the type {kind}, which is no NeoBERT; choose a checkpoint of "
            + ", ".join(other.__name__ for other in AUTO_CLASSES.values() if other is not NeoBERTConfig)
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

    parts = [folder / path for module in read_json(folder / "modules.json") if (path := module.get("path"))]
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


def files_of(folder: Path) -> list[Path]:
    """Return the files in a folder that are not hidden, nor in a hidden folder, such as those of git."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def read_record(out: Path) -> dict[str, str]:
    """Return the hashes of the files that the last build wrote; empty if this is unknown, so that no file counts as its own."""
    try:
        record = read_json(out / RECORD)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse a folder with files other than README.md and those of the last build, or with a file that was changed since.

    Raises:
        ValueError: It is such a folder and `overwrite` is False, or no build wrote one of `OTHERS`, which would stay.
    """
    record = read_record(out)
    if other := [name for name in OTHERS if (out / name).exists() and name not in record]:
        raise ValueError(f"{out} holds {other[0]}, which a build does not replace; choose another folder")
    is_interrupted = record and not (out / "config.json").exists()  # so there is no model to lose
    if overwrite or is_interrupted:
        return
    for file in files_of(out):
        name = file.relative_to(out).as_posix()
        if name != CARD and (name not in record or record[name] != file_hash(file)):
            what = "was changed after the last build" if name in record else "was not written by a build"
            raise ValueError(
                f"{out} holds {name}, which {what}; choose another folder, or give --overwrite to lose the model in it; "
                "nothing was written"
            )


def move_files(source: Path, out: Path, last: str, stale: Iterable[str] = ()) -> None:
    """Rename `source` to `out`, or, if `out` has files, move each file into it: hidden ones after others, then the file `last`.

    An older `last` is removed first, so an interrupted move leaves a folder without it. Before the new one, weights and the files
    `stale` of an earlier build are removed: a loader could read them. Other files stay.
    """
    if not out.exists() or not any(out.iterdir()):
        if out.exists():
            out.rmdir()
        os.replace(source, out)
        return
    (out / last).unlink(missing_ok=True)
    files = [file.relative_to(source) for file in source.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: (str(file) == last, file.name.startswith("."))):
        if str(file) == last:
            weights = [old for pattern in WEIGHTS for old in out.glob(pattern)]
            for old in [*weights, *(out / name for name in stale)]:
                if old.relative_to(out) not in files:
                    old.unlink(missing_ok=True)
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / file, out / file)


def main() -> None:
    """Build the folder and print the next command."""
    parser = CommandParser(BuildArguments, prog="build.py", description=BuildArguments.__doc__)
    (arguments,) = parser.parse_args_into_dataclasses()
    logging.disable_progress_bar()
    folder = run_command(parser.prog, build, arguments)
    print(
        f"built {folder}; next: python hub_upload/push.py {folder} {arguments.model_id or 'org/name'}", file=sys.stderr
    )


if __name__ == "__main__":
    main()
