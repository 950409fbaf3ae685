"""Model cards: the README.md of whatever is saved, with the Hub's metadata, an example that ran, training data and results.

A card ends with a comment that holds its hash. A card whose text is another belongs to a person, and stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download, metadata_load
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, TrainingArguments
from transformers.utils import logging

from ..data.files import writing
from ..data.origins import read_json

if TYPE_CHECKING:
    from sentence_transformers.base.model import BaseModel

logger = logging.get_logger(__name__)

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("model_card_template.md")
SEAL = re.compile(r"\n<!-- neobert_hf ([0-9a-f]{64}): .* -->\s*\Z")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]+)?|multilingual")  # ISO 639, or "code"
SHOWN = 50  # classes or files on a card


@dataclass
class CardFacts:
    """What a card says beyond what the saved folder says itself.

    Args:
        source: Folder or Hub id of the model that the training started from; its card gives what is not given here.
        model_id: Name on the Hub, organisation/name, for the example; by default the name of the folder.
        license: Identifier of the Hub, such as apache-2.0.
        language: Codes of ISO 639, such as en.
        rows: Number of training rows by name of the file or the dataset; None if it is unknown.
        datasets: Ids of the datasets on the Hub that the training read.
        results: Scores.
        relation: finetune, or None if the model is the one of `source` itself.
        is_pair: Whether an example has two texts.
    """

    source: str | None = None
    model_id: str | None = None
    license: str | None = None
    language: Sequence[str] | None = None
    rows: Mapping[str, int | None] = field(default_factory=dict)
    datasets: Sequence[str] = ()
    results: Sequence[EvalResult] = ()
    relation: str | None = "finetune"
    is_pair: bool = False


def write_card(folder: str | Path, facts: CardFacts, model: BaseModel | None = None) -> bool:
    """Write the card of a saved model into its folder.

    The folder says what the model is: task, labels, shape, number of parameters. The example runs once, and the card shows its
    output. Names and labels may come from untrusted files, so they are escaped.

    Args:
        folder: Folder of a saved model: of transformers, an adapter of PEFT, or of sentence-transformers.
        facts: What the folder does not say.
        model: The model of sentence-transformers, whose own generator makes the card.

    Returns:
        False if the folder holds a card that a person wrote or edited, which stays.

    Raises:
        ValueError: A fact is not valid metadata of the Hub.
        OSError: The folder cannot be read or written.
    """
    raise NotImplementedError
