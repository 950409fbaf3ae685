"""Checks that phase 2 continues the model of phase 1, and holds out only documents that phase 1 held out."""

from pathlib import Path

from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..runs.folders import RUN, SUMMARY
from ..runs.manifests import read_json_object

logger = logging.get_logger(__name__)


def check_start(
    model: PreTrainedModel, init_from: str | Path, architecture: str, num_tokens: int, tokenizer_sha256: str
):
    """Check that phase 2 continues the model of phase 1 with the same architecture and tokenizer.

    Args:
        model: The model of phase 1.
        init_from: Its folder, or the folder of one of its checkpoints, or an id on the Hub.
        architecture: Model type of the recipe of phase 2.
        num_tokens: Vocabulary size of the tokenizer of phase 2.
        tokenizer_sha256: Hash of this tokenizer.
    """
    if model.config.model_type != architecture:
        raise ValueError(
            f"{init_from} has the architecture {model.config.model_type}, and the recipe {architecture}; give the --recipe of "
            "phase 1"
        )
    file = _run_file(init_from)
    first = read_json_object(file).get("tokenizer_sha256") if file else None
    if num_tokens > model.config.vocab_size or first not in (None, tokenizer_sha256):
        raise ValueError(
            f"the tokenizer is not that of {init_from}, which has {model.config.vocab_size} tokens (this one {num_tokens}); give "
            "the --tokenizer_name of phase 1"
        )


def check_held_out(init_from: str | Path, run: dict) -> None:
    """Check that phase 1 did not train on the documents of the training text that phase 2 holds out.

    Args:
        init_from: Folder of the model of phase 1, or of one of its checkpoints; a warning says that it describes no run.
        run: Identity of the run of phase 2.

    Raises:
        ValueError: Phase 1 may have trained on documents that are held out here.
    """
    file = _run_file(init_from)
    if file is None:
        logger.warning(
            f"{init_from} holds no {RUN}: its training may have used the documents that are held out here; give "
            "--validation_files to evaluate on other text"
        )
        return
    first, reasons = read_json_object(file), []
    held_out, num_held_out = first.get("held_out", {}), run["held_out"]["num_held_out"]
    if "num_documents" not in first.get("data", {}):
        reasons.append("it had --streaming, which holds out no document")
    elif held_out.get("files"):
        reasons.append("it had --validation_files")
    elif held_out.get("num_held_out", 0) < num_held_out:
        reasons.append(f"num_held_out was {held_out.get('num_held_out')} and is {num_held_out}")
    else:
        if first.get("seed") != run["seed"]:
            reasons.append(f"seed was {first.get('seed')} and is {run['seed']}")
        if first["data"] != run["data"]:
            reasons.append("its training text was another")
    if reasons:
        raise ValueError(
            f"phase 1 in {init_from} may have trained on the documents that are held out here: {'; '.join(reasons)}. Give "
            "--validation_files, or the values of phase 1"
        )


def _run_file(init_from):
    """Return the file that describes the run of a model or of one of its checkpoints, or None."""
    folder = Path(init_from)
    folders = [folder, folder.parent] if folder.name.startswith(PREFIX_CHECKPOINT_DIR) else [folder]
    return next((path / name for path in folders for name in (RUN, SUMMARY) if (path / name).is_file()), None)
