"""`write_card`: the model card of a saved folder, from its configs and the record of its training (`training.json`)."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig, AutoTokenizer

from ..data.lengths import as_list
from ..files.json_files import read_json
from ..files.messages import say
from ..files.output import check_file, list_files, listed_files, writing
from .adapters import labels_of_adapter
from .embedding_models import role_of
from .layouts import FLOATS, read_header
from .modules import read_kind
from .record import MINI, RECORD, is_generated, origin_of
from .trust import check_links

CARD = "README.md"
UNKNOWN_LICENSE = "The licence is not known: ask the author before you use it."
TEMPLATE = Path(__file__).with_name("card_template.md")
# By the end of an architecture's name: the task on the Hub, and what the model does. Another model is an encoder.
TASKS = {
    "ForMaskedLM": ("fill-mask", "fills masks in texts"),
    "LMHead": ("fill-mask", "fills masks in texts"),
    "ForSequenceClassification": ("text-classification", ""),
    "ForTokenClassification": ("token-classification", "tags the words of a text"),
    "ForQuestionAnswering": (
        "question-answering",
        "answers a question by a part of a text, or says that it has no answer",
    ),
    "ForMultipleChoice": ("multiple-choice", "chooses one of several answers to a question"),
}
ENCODER = ("feature-extraction", "turns a text into vectors, one for each token")
EMBEDDERS = {
    "SentenceTransformer": (
        "sentence-similarity",
        "turns a text into a vector; texts of similar meaning have similar vectors",
    ),
    "SparseEncoder": ("feature-extraction", "turns a text into weights of words, for search"),
    "MultiVectorEncoder": ("feature-extraction", "turns a text into a vector for each token, for search"),
    "CrossEncoder": ("text-ranking", "says how well a text answers a question"),
}
# Metrics that a card shows, by the end of their name: the id on the Hub, and the name.
METRICS = {
    "accuracy": ("accuracy", "accuracy"),
    "f1": ("f1", "F1"),
    "f1_micro": ("f1", "F1 over all decisions"),
    "precision": ("precision", "precision"),
    "recall": ("recall", "recall"),
    "matthews": ("matthews_correlation", "Matthews' correlation"),
    "pearson": ("pearsonr", "Pearson's correlation"),
    "spearman": ("spearmanr", "Spearman's correlation"),
    "mse": ("mse", "mean squared error"),
    "exact_match": ("exact_match", "exact match"),
    "masked_accuracy": ("accuracy", "accuracy at masked tokens"),
    "perplexity": ("perplexity", "perplexity of masked tokens"),
} | {name: (name.lower(), name) for name in ("recall@1", "recall@10", "MRR@10", "nDCG@10", "map")}


# Kinds of scores beside those of the model, and their columns.
BESIDE = {"words": "words given", "pipeline": "pipeline", "trivial": "trivial answer", "tfidf": "TF-IDF"}


def write_card(
    folder: str | Path,
    model_id: str | None = None,
    license: str | None = None,
    language: Sequence[str] | None = None,
    record_folder: str | Path | None = None,
    example: Sequence[str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write the card of a saved model as README.md into its folder.

    The folder says what the model is: task, labels, shape, number of parameters. `training.json` says what it was trained on.
    Names and labels may come from files of other people, so they are escaped.

    Args:
        folder: Folder of a saved model: of transformers, an adapter of PEFT, or of sentence-transformers.
        model_id: Name on the Hub, for the example; by default that of the record, or the name of the folder.
        license: Identifier of the Hub, such as apache-2.0; by default that of the record.
        language: Codes of ISO 639, such as en; by default those of the record.
        record_folder: Folder that holds `training.json`; by default that of the model.
        example: One or two texts, as the model reads them, for the example; everybody who sees the card can read them.
        overwrite: Replace another README.md. One that Trainer or sentence-transformers made by itself is always replaced.

    Raises:
        ValueError: A config is damaged or of another kind, or `check_links` refuses the folder.
        FileExistsError: There is another README.md.
        OSError: The folder holds no model, or the card cannot be written.
    """
    folder = Path(folder)
    check_links(folder)
    file = Path(record_folder or folder) / RECORD
    record = plain(read_json(file)) if file.is_file() else {}
    values = _describe(folder)
    start = plain(origin_of(values["base_id"])) if values["base_id"] else record.get("source")
    if values["base_id"] and Path(values["base_id"]).is_dir():  # a folder of this machine by its name alone
        values["base_id"] = Path(values["base_id"]).name
    base = None if start == MINI else start
    name = plain(model_id or record.get("model_id") or folder.resolve().name).strip("/")
    scores = [found for score in record.get("scores", ()) for found in _results(values["task"], score)]
    results = [result for result, _ in scores]
    data = ModelCardData(
        library_name=values["library"],
        pipeline_tag=values["task"],
        tags=plain([values["config"].model_type, *{values["library"]} & {"sentence-transformers"}]),
        license=plain(license) or record.get("license"),
        language=plain(as_list(language or record.get("language"))) or None,
        base_model=base,
        base_model_relation=("adapter" if values["library"] == "peft" else "finetune") if base else None,
        datasets=record.get("datasets") or None,
        model_name=name.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        **values,
        model_id=name,
        start=start,
        example=example,
        record=record,
        scores=scores,
        columns=BESIDE,
        unknown_license=UNKNOWN_LICENSE,
        python=python,
        markdown=markdown,
    )
    _write(folder, str(card).encode(), overwrite)
    if example:
        say(f"{folder / CARD} shows a row of your data, {' | '.join(example)!r}; replace it if it must stay private")


def _write(folder: Path, content: bytes, overwrite: bool) -> None:
    """Write README.md, and list it if the folder has a list of files."""
    file = folder / CARD
    is_same = file.is_file() and file.read_bytes() == content
    check_file(file, overwrite or is_same or is_generated(file))
    with writing(file) as handle:
        handle.write(content)
    if listed_files(folder):
        list_files(folder, [CARD])


def plain(value: Any) -> Any:
    """Return a value with its strings as single lines, without characters that control a terminal or the direction of text."""
    if isinstance(value, str):
        return "".join(character for character in " ".join(value.split()) if character.isprintable())
    if isinstance(value, Mapping):
        return {plain(name): plain(part) for name, part in value.items()}
    return list(map(plain, value)) if isinstance(value, list) else value


def markdown(text: Any) -> str:
    """Escape `text` as one line of plain Markdown text, without markup, HTML, table cells or control characters."""
    return re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", html.escape(plain(str(text)), quote=False))


def python(value: str | list[str]) -> str:
    """Return a literal of Python, in which characters that control a terminal or the direction of text are escaped."""
    literal = json.dumps(value, ensure_ascii=False)
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in literal)


def _describe(folder: Path) -> dict[str, Any]:
    """What a saved folder says of its model."""
    base, kind = read_base(folder), read_kind(folder)
    if kind not in (None, *EMBEDDERS):
        raise ValueError(f"{folder} holds a {markdown(kind)}, which is not one of {', '.join(EMBEDDERS)}")
    config, tokenizer = AutoConfig.from_pretrained(base or folder), AutoTokenizer.from_pretrained(folder)
    name = "ForSequenceClassification" if base else (config.architectures or [""])[0]
    task, does = next((found for end, found in TASKS.items() if name.endswith(end)), ENCODER)
    role = kind and role_of(folder, config)
    problem_type, labels = config.problem_type, [config.id2label[i] for i in range(config.num_labels)]
    if base:
        problem_type, labels = labels_of_adapter(folder)
    if role == "classes":
        task = "text-classification"
    elif role and kind:
        task, does = EMBEDDERS[kind]
    if task == "text-classification":
        does = {
            "regression": "predicts a number for a text",
            "multi_label_classification": f"says which of {len(labels)} classes a text has",
        }.get(problem_type, f"puts a text into one of {len(labels)} classes")
    return {
        "task": task,
        "does": does,
        "kind": kind,
        "library": "peft" if base else "sentence-transformers" if kind else "transformers",
        "base_id": base,
        "labels": labels if task in ("text-classification", "token-classification") else [],
        "problem_type": problem_type,
        "config": config,
        "tokenizer": tokenizer,
        "size": _count_parameters(folder),
    }


def read_base(folder: Path) -> str | None:
    """Return the folder or id of the base model of an adapter; None for a model.

    Raises:
        ValueError: adapter_config.json is damaged, or names none.
    """
    file = folder / "adapter_config.json"
    content = read_json(file) if file.is_file() else {"base_model_name_or_path": None}
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if file.is_file() and not (isinstance(base, str) and base):
        raise ValueError(
            f"{file} names no base_model_name_or_path; save the adapter again, or name its base model there"
        )
    return base


def _count_parameters(folder: Path) -> tuple[int, str]:
    """Number of parameters of a folder and the dtype of the first one, from the headers of its files."""
    files = (*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("[0-9]*_*/*.safetensors")))
    tensors = [tensor for file in files for tensor in read_header(file).values()]
    dtype = tensors[0].dtype if tensors else ""
    return sum(math.prod(tensor.shape) for tensor in tensors), str(FLOATS.get(dtype, dtype)).removeprefix("torch.")


def _results(task: str, score: Mapping[str, Any]) -> list[tuple[EvalResult, dict[str, float]]]:
    """The metrics of an evaluation that a card shows, each with those of simpler answers that the record has."""
    found = []
    for key, value in score["metrics"].items():
        end = re.split(r"^(?:eval|test)_|_(?=[^_]*@|map$)", key)[-1]
        for name, (hub_name, title) in METRICS.items():
            if end.lower() == name.lower() and math.isfinite(value):
                dataset = {"dataset_type": score.get("dataset_id") or "unknown", "dataset_name": score["dataset"]}
                more = {"dataset_config": score.get("config"), "dataset_split": score.get("split")}
                metric = {"metric_type": hub_name, "metric_value": round(value, 4), "metric_name": title}
                beside = {name: score[name][key] for name in BESIDE if key in score.get(name, ())}
                found.append((EvalResult(task, **metric, **dataset, **more), beside))
    return found
