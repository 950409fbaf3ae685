"""Build a folder for the Hub: weights, config, tokenizer, model code and model card.

python hub_upload/build.py --model DIR_OR_ID --out HUB_DIR [--model_id org/name] [--metrics metrics.json]
python hub_upload/verify.py HUB_DIR
hf upload org/name HUB_DIR
"""

import html
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..commands import CommandParser, run_command
from ..data.files import saving
from ..data.wordpiece import name_tokenizer_class
from ..model import modeling_neobert
from ..model.modeling_neobert import AUTO_CLASSES

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt")
WRITTEN = ("config.json", "model.safetensors", "model.safetensors.index.json")  # at least one exists at any time
# names in a folder that this command wrote, and the hidden ones of git and of the Hub
BUILT = (
    *WRITTEN,
    "model-*.safetensors",
    "*_neobert.py",
    "README.md",
    "*token*",
    "vocab*",
    "merges.txt",
    "chat_template*",
    ".*",
)
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
    out: str = field(metadata={"help": "Folder to write; created if missing, refused if it holds other files."})
    tokenizer: str = field(default=None, metadata={"help": "Tokenizer, if it is not in the folder of the model."})
    model_id: str = field(default=None, metadata={"help": "Name on the Hub, for the card's examples. Default: --out."})
    metrics: list[str] = field(default_factory=list, metadata={"help": "JSON files with numbers for the card."})


def build(arguments: BuildArguments) -> Path:
    """Write the Hub folder and return its path; an incomplete folder has no `config.json`, so that it cannot be loaded.

    Raises:
        ValueError: The folder holds other files, the checkpoint is not a NeoBERT, `model_id` is not a valid id of the Hub, or a
            file of metrics is not JSON.
        OSError: The model or its tokenizer cannot be read, or the folder cannot be written.
    """
    out = Path(arguments.out)
    is_ours = (out / "modeling_neobert.py").is_file() and any((out / name).is_file() for name in WRITTEN)
    if out.exists() and any(out.iterdir()) and not is_ours:
        raise ValueError(f"{out} holds files but no NeoBERT; choose another folder, nothing was written")
    if not Path(arguments.model).is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", arguments.model):
        raise ValueError(
            f"{arguments.model} is neither an existing folder nor an id on the Hub such as org/name; check the name"
        )
    if not Path(arguments.model).is_dir() and "/" in arguments.model and Path(arguments.model).parent.is_dir():
        raise ValueError(
            f"{arguments.model} does not exist, but {Path(arguments.model).parent} is a local folder; check the path"
        )
    if arguments.model_id is not None:
        validate_repo_id(arguments.model_id)
    metrics = read_metrics(arguments.metrics)
    config = AutoConfig.from_pretrained(arguments.model)
    name = (config.architectures or ["NeoBERTForMaskedLM"])[0]
    model_class = getattr(modeling_neobert, name, None)
    if model_class not in AUTO_CLASSES.values():
        raise ValueError(
            f"{arguments.model} has architecture {name!r}; choose a checkpoint of {', '.join(modeling_neobert.__all__)}"
        )
    model = model_class.from_pretrained(arguments.model, dtype="auto")
    tokenizer_source = arguments.tokenizer or arguments.model
    if Path(tokenizer_source).is_dir() and not any(
        (Path(tokenizer_source) / name).exists() for name in TOKENIZER_FILES
    ):
        raise ValueError(
            f"{tokenizer_source} holds no tokenizer ({' or '.join(TOKENIZER_FILES)}); give one with --tokenizer"
        )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_source)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {tokenizer_source} has {len(tokenizer)} tokens, but the model has {config.vocab_size}; "
            "give the tokenizer of this model"
        )

    out.parent.mkdir(parents=True, exist_ok=True)
    if foreign := sorted(each.name for each in out.glob("*") if not any(each.match(pattern) for pattern in BUILT)):
        raise ValueError(
            f"{out} holds {foreign[0]}, which this command does not write; choose another folder, nothing was written"
        )
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as beside:
        built = Path(beside, out.name)
        with saving(out):
            model.save_pretrained(built)
            tokenizer.save_pretrained(built)
            name_tokenizer_class(built)
            write_card(model, tokenizer, built, arguments.model_id or str(out), metrics)
        move_files(built, out, last="config.json")
    return out


def move_files(source: Path, out: Path, last: str) -> None:
    """Rename `source` to `out`, or, if `out` has files, move each file into it and the file `last` after all others.

    An older `last` is removed first, so an interrupted move leaves a folder without it. Other files stay.
    """
    if not out.exists() or not any(out.iterdir()):
        if out.exists():
            out.rmdir()
        os.replace(source, out)
        return
    (out / last).unlink(missing_ok=True)
    files = [file.relative_to(source) for file in source.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: str(file) == last):
        if str(file) == last:
            for weights in out.glob("model*.safetensors*"):  # a loader could read old weights instead of new ones
                if weights.name not in map(str, files):
                    weights.unlink()
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / file, out / file)


def read_metrics(files: list[str]) -> dict[str, float]:
    """Read the measured numbers from JSON files such as `training_summary.json`.

    Numbers count, and numbers in an object of numbers only; other values describe the run and are ignored.
    """
    metrics = {}
    for file in files:
        try:
            content = json.loads(Path(file).read_text("utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{file} is not JSON in UTF-8 ({error}); give a file such as training_summary.json"
            ) from error
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

    Names and tokens may come from untrusted files, so the template escapes each for its context (Python string or Markdown).
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
    (out / "README.md").write_text(str(card), "utf-8")


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
