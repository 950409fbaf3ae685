"""Build the folder that goes to the Hub: weights, config, tokenizer, modules of sentence-transformers, model code and card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, PreTrainedModel

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.checkpoints import SavedModel, load_tokenizer
from neobert_hf.checkpoints.card import CARD, UNKNOWN_LICENSE, write_card
from neobert_hf.checkpoints.embedding_models import adopt, open_embedding_model
from neobert_hf.checkpoints.network import check_finite, class_of
from neobert_hf.checkpoints.record import RECORD, is_generated
from neobert_hf.checkpoints.tokenizer import keep_known_settings
from neobert_hf.files import check_folder, new_folder, read_json, write_json

if TYPE_CHECKING:
    from sentence_transformers.base.model import BaseModel

FIGURES = ("sources.json", "training_summary.json")  # which the card of the mini model names


def build(
    model: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    model_id: str | None = None,
    license: str | None = None,
    language: list[str] | None = None,
) -> Path:
    """Write the Hub folder and return its path; it appears when it is complete.

    Args:
        model: Checkpoint to publish: a folder, or an id on the Hub.
        out: Folder to write, new or empty.
        tokenizer: Folder or Hub id of the tokenizer, if it is not in the folder of the model.
        model_id: Name on the Hub, for the card's example; by default that of `out`.
        license: Licence, for the card; by default that of the model's card.
        language: Languages, for the card, such as en; by default those of the model's card.

    Raises:
        ValueError: The checkpoint is not a NeoBERT or more than one, or not whole,
            its tokenizer is not its own, a link leaves its folder, or the name is not valid on the Hub.
        OSError: The folder holds other files, the model or its tokenizer cannot be read, or the folder cannot be written.
    """
    out = Path(out).resolve()  # of "folder/.." the name would be that of another folder
    check_folder(out)
    if model_id is not None:
        validate_repo_id(model_id)
    saved = SavedModel(model)
    folder = saved.folder
    network, dtype = load_model(saved), AutoConfig.from_pretrained(folder).dtype
    embedder = load_embedder(saved)
    loaded_tokenizer = load_tokenizer(str(tokenizer or folder), network.config.vocab_size)

    with new_folder(out) as built:
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
    return out


def write_card_of_build(folder: Path, source: str, built: Path, **options: Any) -> None:
    """Write the card from the record of a training; or copy that of a folder, with the name, licence and language that are given.

    A card that a library made by itself, and that of a model on the Hub, which describes other code, give licence and language.
    So does one of `write_card` that says that the licence is not known, if there is a record to write it anew from.
    """
    is_local = Path(source).is_dir()
    file = folder / CARD if is_local else source
    has_record = is_local and (folder / RECORD).is_file()
    record: dict[str, Any] = {"record_folder": folder} if has_record else {}
    try:
        card = ModelCard.load(file, ignore_metadata_errors=True)
        known = card.data.to_dict()
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        if file == folder / CARD and file.is_file():
            raise ValueError(f"{file} is no model card: {error}; correct its metadata, or remove it") from error
        return write_card(built, **options, **record)
    found = {name: options[name] or known.get(name) for name in ("license", "language")}
    is_outdated = has_record and (options["license"] or options["language"]) and UNKNOWN_LICENSE in card.text
    if not is_local or is_outdated or is_generated(Path(file)):
        return write_card(built, options["model_id"], **found, **record)
    card.text = card.text.replace(json.dumps(folder.name), json.dumps(options["model_id"]))  # in its example
    if found["license"]:
        card.text = card.text.replace(UNKNOWN_LICENSE, "")
    card.data.license, card.data.language = found["license"], found["language"]
    card.save(built / CARD)
    if folder.resolve() == Path(MINI_MODEL_PATH).resolve():
        for name in FIGURES:
            shutil.copy(folder / name, built)


def load_model(saved: SavedModel) -> PreTrainedModel:
    """Load a checkpoint to publish, in the class that its config names and the dtype in which it is stored.

    Raises:
        ValueError: It is not a NeoBERT, or is an adapter, or as of `SavedModel.check_head`.
        OSError: It cannot be read.
    """
    saved.check_neobert()
    name = saved.architecture or "NeoBERTForMaskedLM"
    model_class = class_of(name)
    if model_class is None:
        raise ValueError(
            f"{saved.source} holds a {name}, which is no NeoBERT; choose a checkpoint of a class of neobert_hf"
        )
    saved.check_head(saved.head if saved.architecture else "masked words")
    config = AutoConfig.from_pretrained(saved.folder)
    config.dtype = None  # so that "auto" is the dtype of the file
    model = model_class.from_pretrained(saved.folder, config=config, dtype="auto")
    check_finite(dict(model.named_parameters()), saved.source)
    keep_known_settings(model.config, saved.source)
    return model


def load_embedder(saved: SavedModel) -> BaseModel | None:
    """Load a model of sentence-transformers in float32 with all of its modules; None if the folder holds a model alone.

    Raises:
        ValueError: The tokenizer is not that of the model.
        OSError: It cannot be read.
    """
    if not saved.modules:
        return None
    import sentence_transformers

    options: dict[str, Any] = {"model_kwargs": {"dtype": "float32"}}
    if saved.library == "SentenceTransformer":
        return open_embedding_model(str(saved.folder), **options)
    model = getattr(sentence_transformers, str(saved.library))(str(saved.folder), **options)
    adopt(model[0], saved.source)
    return model
