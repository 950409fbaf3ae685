"""The file of a model card: its seal, changes to it, and the metadata of the cards of other people.

A card ends with a comment that holds its hash. A card whose text is another belongs to a person, and stays.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, hf_hub_download
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

from ..data.files import writing

logger = logging.get_logger(__name__)

CARD = "README.md"
SEAL = "<!-- neobert_hf {}: an edited card is never replaced -->\n"
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]+)?|code|multilingual")
RELATIONS = ("finetune", "adapter", "quantized", "merge")


def save_card(file: str | Path, card: ModelCard) -> None:
    """Write a card with the comment that tells it from one that a person edited.

    Raises:
        OSError: The file cannot be written.
    """
    text = str(card).rstrip() + "\n"
    with writing(Path(file)) as stream:
        stream.write((text + SEAL.format(_hash(text))).encode())


def is_edited(folder: str | Path) -> bool:
    """Whether a folder holds a card that this module did not write, or whose text has changed since."""
    file = Path(folder, CARD)
    if not file.is_file():
        return False
    text = file.read_text("utf-8", "replace")
    seal = seal_of(text)
    return seal is None or seal != _hash(_without_seal(text))


@contextlib.contextmanager
def editing_card(file: str | Path) -> Iterator[ModelCard]:
    """Load a card, and save it with its changes; a card that no person edited still counts as such.

    Raises:
        ValueError: The card does not exist, or its metadata are damaged.
        OSError: The file cannot be written.
    """
    file = Path(file)
    card = ModelCard.load(file)
    is_ours = not is_edited(file.parent)
    card.text = _without_seal(card.text)
    yield card
    if is_ours:
        save_card(file, card)
    else:
        card.save(file)


@contextlib.contextmanager
def keeping_card(folder: str | Path) -> Iterator[None]:
    """Keep the card of a folder, or its absence, while a library saves a model there with a card of its own."""
    file = Path(folder, CARD)
    before = file.read_bytes() if file.is_file() else None
    try:
        yield
    finally:
        if before is None:
            file.unlink(missing_ok=True)
        elif file.read_bytes() != before:
            file.write_bytes(before)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def seal_of(text: str) -> str | None:
    """Return the hash in the comment at the end of a card, None if there is none."""
    found = re.search(SEAL.format("([0-9a-f]{64})") + r"\Z", text)
    return found and found[1]


def _without_seal(text: str) -> str:
    return re.sub(SEAL.format("[0-9a-f]{64}") + r"\Z", "", text)


def read_card(source: str | None) -> str:
    """Return the card of a folder or Hub id; empty if a folder has none, and with a warning if it cannot be read."""
    if source is None:
        return ""
    try:
        if Path(source).is_dir():
            file = Path(source, CARD)
            return file.read_text("utf-8") if file.is_file() else ""
        return Path(hf_hub_download(source, CARD)).read_text("utf-8")
    except (OSError, ValueError):
        logger.warning(f"the card of {source} cannot be read, so its licence and language are unknown; give them")
        return ""


def valid_metadata(text: str) -> dict:
    """Return the valid part of the metadata of a card of other people."""
    try:
        data = ModelCard(text, ignore_metadata_errors=True).data.__dict__ if text.startswith("---") else {}
    except (ValueError, TypeError, AttributeError, yaml.YAMLError):
        return {}
    languages = [data["language"]] if isinstance(data.get("language"), str) else data.get("language")
    bases = [data["base_model"]] if isinstance(data.get("base_model"), str) else data.get("base_model")
    tests = {"language": (languages, LANGUAGE.fullmatch), "base_model": (bases, _is_id)}
    tests |= {"datasets": (data.get("datasets"), _is_id), "license": ([data.get("license")], LICENSE.fullmatch)}
    tests |= {name: ([data.get(name)], str.strip) for name in ("license_name", "license_link")}
    tests["base_model_relation"] = ([data.get("base_model_relation")], RELATIONS.__contains__)
    found = {
        name: [value for value in values if isinstance(value, str) and test(value)]
        for name, (values, test) in tests.items()
        if isinstance(values, list)
    }
    lists = ("language", "datasets")
    found = {name: values if name in lists else values[0] for name, values in found.items() if values}
    return found | {"results": [result for result in data.get("eval_results") or () if _is_score(result)]}


def _is_score(result: EvalResult) -> bool:
    texts = result.task_type, result.dataset_type, result.dataset_name, result.metric_type
    others = result.metric_name, result.dataset_split
    is_text = all(isinstance(value, str) for value in (*texts, *(value for value in others if value is not None)))
    return is_text and isinstance(result.metric_value, int | float | str)


def _is_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return "/" in name


def check_metadata(
    license: str | None = None, language: Sequence[str] | None = None, model_id: str | None = None
) -> None:
    """Refuse what the Hub refuses in the metadata of a card.

    Raises:
        ValueError: The licence is no identifier, a language no code of ISO 639, or `model_id` no valid name of a repository.
    """
    if license is not None and not LICENSE.fullmatch(license):
        raise ValueError(
            f"license={license!r} is no identifier of the Hub; give one such as mit, apache-2.0 or cc-by-4.0, or other"
        )
    if wrong := [code for code in language or () if not LANGUAGE.fullmatch(code)]:
        raise ValueError(f"language={wrong[0]!r} is no code of ISO 639; give codes such as en or de, or multilingual")
    if model_id is not None:
        validate_repo_id(model_id)
