"""Model cards whose results a command replaces."""

from pathlib import Path

from huggingface_hub import ModelCard
from yaml import YAMLError


def load_card(file: str | Path) -> ModelCard:
    """Read a model card.

    Raises:
        ValueError: The YAML at its beginning is damaged.
        FileNotFoundError: There is no such file.
        OSError: The file cannot be read.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file} is not a file; name the README.md of the model")
    try:
        return ModelCard.load(file)
    except YAMLError as error:
        raise ValueError(f"the YAML at the beginning of {file} is damaged: {error}") from error
