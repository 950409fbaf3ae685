"""`load_with_new_head`: a model whose head may be new is loaded without the report of transformers on the head."""

import logging
import re
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from ..files.messages import warn
from .progress import without_bars

Loaded = TypeVar("Loaded", bound=nn.Module)
LOGGERS = ("transformers.modeling_utils", "transformers.utils.loading_report")
REPORTS = ("LOAD REPORT", "newly initialized", "were not used when initializing")  # of transformers 5, and twice of 4


def load_with_new_head(load: Callable[[], Loaded]) -> Loaded:
    """Load a model without a report on its head; a warning names weights of the encoder that are missing or unexpected.

    Args:
        load: Returns a model of transformers, or a model of sentence-transformers that begins with one.
    """
    reports = []

    def keep_back(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_report = any(words in text for words in REPORTS) and "CONVERSION" not in text  # which precedes an error
        reports.extend([text] * is_report)
        return not is_report

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(keep_back)
    try:
        with without_bars():
            model = load()
    finally:
        for logger in loggers:
            logger.removeFilter(keep_back)
    network = model[0].model if isinstance(model, nn.Sequential) else model
    # a pooler is trained with the head
    pattern = rf"(?:^|(?<=[\s'])){network.base_model_prefix}\.(?!pooler\.)[^|':\n]+"
    names = sorted({name.strip() for text in reports for name in re.findall(pattern, text)})
    if names:
        fact = f"weights of the encoder in {network.name_or_path} are missing, unexpected or of another shape"
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")
        warn(f"{fact}: {shown}; save the model again, or give another one")
    return model
