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
from .network import count_parameters
from .record import MINI, RECORD, is_generated, origin_of
from .saved_model import SavedModel

CARD = "README.md"
UNKNOWN_LICENSE = "The licence is not known: ask the author before you use it."
TEMPLATE = Path(__file__).with_name("card_template.md")
# By the kind of a model: the task on the Hub, and what the model does.
TASKS = {
    "encoder": ("feature-extraction", "turns a text into vectors, one for each token"),
    "masked words": ("fill-mask", "fills masks in texts"),
    "classes": ("text-classification", ""),
    "tags": ("token-classification", "tags the words of a text"),
    "spans": ("question-answering", "answers a question by a part of a text, or says that it has no answer"),
    "choices": ("multiple-choice", "chooses one of several answers to a question"),
    "vector": ("sentence-similarity", "turns a text into a vector; texts of similar meaning have similar vectors"),
    "sparse": ("feature-extraction", "turns a text into weights of words, for search"),
    "multi-vector": ("feature-extraction", "turns a text into a vector for each token, for search"),
    "score": ("text-ranking", "says how well a text answers a question"),
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
BESIDE = {"trivial": "trivial answer", "tfidf": "TF-IDF", "frozen": "frozen vectors"}


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
    file = Path(record_folder or folder) / RECORD
    record = plain(read_json(file)) if file.is_file() else {}
    values = _describe(SavedModel(folder).check())
    start = record.get("source")
    base = values["base_id"]
    if base:
        start = plain(origin_of(base))
        if Path(base).is_dir():  # a folder of this machine by its name alone
            values["base_id"] = Path(base).name
    name = plain(model_id or record.get("model_id") or folder.resolve().name).strip("/")
    scores = [found for score in record.get("scores", ()) for found in _results(values["task"], score)]
    results = [result for result, _ in scores]
    data = _metadata(values, name, start, results)
    data.license = plain(license) or record.get("license")
    data.language = plain(as_list(language or record.get("language"))) or None
    data.datasets = record.get("datasets") or None
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


def _describe(saved: SavedModel) -> dict[str, Any]:
    """What a saved folder says of its model."""
    base = saved.base if saved.is_adapter else None
    task, does = TASKS[saved.kind]
    labels = saved.labels if saved.kind in ("classes", "tags") else []
    if saved.kind == "classes":
        does = {
            "regression": "predicts a number for a text",
            "multi_label_classification": f"says which of {len(labels)} classes a text has",
        }.get(saved.problem_type, f"puts a text into one of {len(labels)} classes")
    library = "sentence-transformers" if saved.library else "transformers"
    return {
        "task": task,
        "does": does,
        "kind": saved.library,
        "library": "peft" if base else library,
        "base_id": base,
        "labels": labels,
        "problem_type": saved.problem_type if labels else None,
        "config": AutoConfig.from_pretrained(base or saved.main),
        "tokenizer": AutoTokenizer.from_pretrained(saved.main),
        "size": count_parameters(saved.folder),
    }


def _metadata(values: Mapping[str, Any], name: str, start: str | None, results: list[EvalResult]) -> ModelCardData:
    """What the Hub reads of a card, as far as the folder and its evaluations say it."""
    data = ModelCardData(
        library_name=values["library"],
        pipeline_tag=values["task"],
        tags=plain([values["config"].model_type, *{values["library"]} & {"sentence-transformers"}]),
    )
    if start not in (None, MINI):
        data.base_model = start
        data.base_model_relation = "adapter" if values["library"] == "peft" else "finetune"
    if results:
        data.model_name = name.split("/")[-1]
        data.eval_results = results
    return data


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
