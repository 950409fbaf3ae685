"""Checkpoints and the Hub: build a folder to publish, verify it, write its card; convert a checkpoint, and examine it.

build(MODEL, OUT)      weights, config, tokenizer, code and card in one folder
verify(FOLDER)         loads that folder in a process without this package
convert(SOURCE, OUT)   another layout, or a pickle, to the published layout
examine(SOURCE)        what is wrong with a checkpoint, and the command that mends it
write_card(FOLDER)     the model card of a training
"""

from .build import build
from .convert import convert
from .doctor import examine
from .verify import verify

__all__ = ["build", "convert", "examine", "verify", "write_card"]


def __getattr__(name: str):
    if name == "write_card":
        from .card import write_card

        return write_card
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
