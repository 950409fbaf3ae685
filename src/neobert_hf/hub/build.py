"""Build a folder for the Hub: weights, config, tokenizer, model code and model card.

python hub_upload/build.py --model DIR_OR_ID --out HUB_DIR [--model_id org/name] [--metrics metrics.json] [--overwrite]
python hub_upload/verify.py HUB_DIR
hf upload org/name HUB_DIR
"""

import html
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, snapshot_download
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.files import file_hash, saving
from ..data.origins import check_source, keep_known_settings, load_tokenizer, read_json
from ..data.wordpiece import name_tokenizer_class
from ..model import modeling_neobert
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import AUTO_CLASSES
from ..runs.commands import CommandParser, run_command

logger = logging.get_logger(__name__)

CARD = "README.md"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors")
RECORD = ".neobert_build.json"  # the hash of each file that the last build wrote
READ = ["*.json", "*.txt", "*.safetensors", "*.jinja", "*.model"]  # of a repository on the Hub; no code
# Folders of other libraries that hold more than a model, by the file that marks them: what they are, and what to do.
OTHERS = {
    "modules.json": (
        "a model of sentence-transformers, which has more modules than a build would keep; neobert_hf.embeddings.models"
        ".open_embedding_model(folder).save_pretrained(out) writes all of them and the code: verify and upload that folder"
    ),
    "adapter_config.json": (
        "an adapter; merge it into its model (PEFT's merge_and_unload), save the model, and build from that folder"
    ),
}
TEMPLATE = Path(__file__).with_name("model_card_template.md")
PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}


@dataclass
class BuildArguments:
    """Sources and target of the build."""

    model: str = field(metadata={"help": "Checkpoint to publish: a folder, or an id on the Hub."})
    out: str = field(metadata={"help": "Folder to write: a new or empty one, or that of an earlier build."})
    tokenizer: str = field(default=None, metadata={"help": "Tokenizer, if it is not in the folder of the model."})
    model_id: str = field(default=None, metadata={"help": "Name on the Hub, for the card's examples. Default: --out."})
    metrics: list[str] = field(default_factory=list, metadata={"help": "JSON files with numbers for the card."})
    overwrite: bool = field(
        default=False,
        metadata={"help": "Replace the model in --out, whatever wrote it. A README.md that was edited stays."},
    )


def build(arguments: BuildArguments) -> Path:
    """Write the Hub folder and return its path; an incomplete folder has no `config.json`, so that it cannot be loaded.

    Raises:
        ValueError: The folder holds other files, the checkpoint is not a NeoBERT or more than one, its tokenizer is not its own,
            a link leaves its folder, `model_id` is not a valid id of the Hub, or a file of metrics is not JSON.
        OSError: The model or its tokenizer cannot be read, or the folder cannot be written.
    """
    out = Path(arguments.out).resolve()  # of "folder/.." the name would be that of another folder
    check_target(out, arguments.overwrite)
    if arguments.model_id is not None:
        validate_repo_id(arguments.model_id)
    metrics = read_metrics(arguments.metrics)
    model, folder = load_model(arguments.model)
    tokenizer = load_tokenizer(arguments.tokenizer or folder, model.config.vocab_size)

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as beside:
        built = Path(beside, out.name)
        with saving(out):
            model.save_pretrained(built)
            tokenizer.save_pretrained(built)
            name_tokenizer_class(built)
            write_card(model, tokenizer, built, arguments.model_id or arguments.out, metrics)
            record = {file.relative_to(built).as_posix(): file_hash(file) for file in files_of(built)}
            earlier = read_record(out)
            if (out / CARD).exists() and file_hash(out / CARD) not in (earlier.get(CARD), record[CARD]):
                logger.warning(f"{out / CARD} is not as a build wrote it, so it stays; move it away to get a new card")
                (built / CARD).unlink()
                del record[CARD]
            (built / RECORD).write_text(json.dumps(record, indent=1), "utf-8")
        present = {file.relative_to(out).as_posix() for file in files_of(out)}  # a record may name files elsewhere
        move_files(built, out, last="config.json", stale=present & earlier.keys() - record.keys() - {CARD})
    return out


def load_model(source: str) -> tuple[PreTrainedModel, str]:
    """Load a checkpoint to publish, in the class and the dtype that its config names; return it and its folder.

    Raises:
        ValueError: It is not a NeoBERT, or is more than one.
        OSError: It cannot be read.
    """
    check_source(source)
    folder = Path(source if Path(source).is_dir() else snapshot_download(source, allow_patterns=READ))
    for name, kind in OTHERS.items():
        if (folder / name).exists():
            raise ValueError(f"{source} holds {kind}")
    config = AutoConfig.from_pretrained(folder)
    name = (config.architectures or ["NeoBERTForMaskedLM"])[0]
    model_class = getattr(modeling_neobert, name, None)
    if type(config) is not NeoBERTConfig or model_class not in AUTO_CLASSES.values():
        raise ValueError(
            f"{source} holds a {name} of the type {config.model_type}, which is no NeoBERT; choose a checkpoint of "
            + ", ".join(other.__name__ for other in AUTO_CLASSES.values() if other is not NeoBERTConfig)
        )
    model = model_class.from_pretrained(folder, dtype="auto")
    keep_known_settings(model.config, source)
    return model, str(folder)


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
        ValueError: It is such a folder and `overwrite` is False, or it is a folder of `OTHERS`, whose modules would stay.
    """
    if other := [name for name in OTHERS if (out / name).exists()]:
        raise ValueError(f"{out} holds {other[0]}, which a build does not replace; choose another folder")
    record = read_record(out)
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


def read_metrics(files: list[str]) -> dict[str, float]:
    """Read the measured numbers from JSON files such as `training_summary.json`.

    Numbers count, and numbers in an object of numbers only; other values describe the run and are ignored.
    """
    metrics = {}
    for file in files:
        content = read_json(Path(file))
        if not isinstance(content, dict):
            raise ValueError(f"{file} holds a {type(content).__name__}; give an object from names to numbers")
        for name, value in content.items():
            nested = value if isinstance(value, dict) else {"": value}
            if nested and all(type(number) in (int, float) for number in nested.values()):
                metrics |= {f"{name} {key}".replace("_", " ").strip(): number for key, number in nested.items()}
    return metrics


def write_card(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    model_id: str,
    metrics: dict[str, float],
) -> None:
    """Render the model card from the template, the config and the metrics.

    Names and tokens may come from untrusted files, so the template escapes them, as Python strings or as Markdown.
    """
    auto_class = next(name for name, model_class in AUTO_CLASSES.items() if type(model) is model_class)
    card = ModelCard.from_template(
        card_data=ModelCardData(
            language="en",
            license="mit",
            library_name="transformers",
            pipeline_tag=PIPELINES[auto_class],
            tags=["neobert", "encoder"],
        ),
        template_path=str(TEMPLATE),
        model_id=model_id,
        auto_class=auto_class,
        auto_classes=[name for name in AUTO_CLASSES if name != "AutoConfig"],
        config=model.config,
        mask_token=tokenizer.mask_token,
        num_parameters=f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        dtype=str(model.dtype).removeprefix("torch."),
        metrics=metrics,
        python=partial(json.dumps, ensure_ascii=False),  # such a JSON string is also a Python string
        markdown=markdown,
    )
    (out / CARD).write_text(str(card), "utf-8")


def markdown(text: str) -> str:
    """Escape `text` as one line of plain Markdown text, without markup, HTML or table cells."""
    return re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def main() -> None:
    """Build the folder and print the next command."""
    parser = CommandParser(BuildArguments, prog="build.py", description=BuildArguments.__doc__)
    folder = run_command(parser.prog, build, *parser.parse_args_into_dataclasses())
    print(f"built {folder}; next: python hub_upload/verify.py {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
