"""Model cards: the README.md of whatever is saved, with the Hub's metadata, an example that ran, training data and results."""

from __future__ import annotations

import contextlib
import html
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, TrainingArguments
from transformers.utils import logging

from ..files.trust import read_json
from . import MINI_MODEL_PATH
from .adapters import labels_of_adapter
from .card_files import CARD, is_edited, read_card, save_card, seal_of, valid_metadata

if TYPE_CHECKING:
    from sentence_transformers.base.model import BaseModel

logger = logging.get_logger(__name__)

TEMPLATE = Path(__file__).with_name("model_card_template.md")
PLACEHOLDER = "organisation/model"  # sentence-transformers does not escape the name in its example
SHOWN = 50  # classes or files on a card
AS_OF_START = ", as on the card of the model that the training started from"
# Tasks of the Hub by the end of an architecture's name; of other architectures it is feature-extraction.
TASKS = {
    "ForMaskedLM": "fill-mask",
    "LMHead": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
# What a model does, by its task, or by its class in sentence-transformers.
DOES = {
    "fill-mask": "fills masks in texts",
    "feature-extraction": "turns a text into vectors, one for each token",
    "token-classification": "tags the words of a text",
    "question-answering": "answers a question by a part of a text, or says that the text has no answer",
    "multiple-choice": "chooses one of several answers to a question",
    "SentenceTransformer": "turns a text into a vector; texts of similar meaning have similar vectors",
    "SparseEncoder": "turns a text into weights of words, for search",
    "MultiVectorEncoder": "turns a text into a vector for each token, for search",
    "CrossEncoder": "reads a question and a text together and says how well the text answers the question",
}
# Metrics of a run that a card shows: their ids on the Hub, and their names.
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
}
RETRIEVAL = re.compile(r"(^|_)(recall@1|recall@10|mrr@10|ndcg@10)$")  # of those that sentence-transformers computes


@dataclass
class CardFacts:
    """What a card says beyond what the saved folder says itself.

    Args:
        source: Folder or Hub id of the model that the training started from. Its card gives the licence and the language if they
            are not given here.
        model_id: Name on the Hub, for the example; by default the name of the folder.
        license: Identifier of the Hub, such as apache-2.0.
        language: Codes of ISO 639, such as en.
        rows: Number of training rows by name of the file or the dataset; None if it is unknown.
        remark: A sentence about the training.
        datasets: Ids of the datasets on the Hub that the training read.
        results: Scores; the task may be empty.
        is_pair: Whether the model reads pairs of texts.
        is_copy: Whether the model is the one of `source` itself, so that all of its metadata hold.
    """

    source: str | None = None
    model_id: str | None = None
    license: str | None = None
    language: Sequence[str] | None = None
    rows: Mapping[str, int | None] = field(default_factory=dict)
    remark: str = ""
    datasets: Sequence[str] = ()
    results: Sequence[EvalResult] = ()
    is_pair: bool = False
    is_copy: bool = False


def training_facts(training: TrainingArguments, source: str | None, **facts) -> CardFacts:
    """Return the facts of a training: its start, and the name, the licence and the language of its arguments."""
    return CardFacts(source, training.hub_model_id, training.license, training.language, **facts)


def eval_results(scores: Mapping[str, float], name: str, dataset_type: str = "unknown", **options) -> list[EvalResult]:
    """Return those of a run's metrics that a card shows.

    Args:
        scores: Metrics by name, which may begin with `eval_` or `test_`.
        name: Name of the dataset.
        dataset_type: Id of the dataset on the Hub.
        options: Other arguments of `EvalResult`.
    """
    found = {re.sub("^(eval|test)_", "", key): value for key, value in scores.items()}
    return [
        EvalResult("", dataset_type, name, hub_name, round(found[key], 4), metric_name=title, **options)
        for key, (hub_name, title) in METRICS.items()
        if key in found and math.isfinite(found[key])
    ]


def write_card(folder: str | Path, facts: CardFacts, model: BaseModel | None = None) -> bool:
    """Write the card of a saved model into its folder.

    The folder says what the model is: task, labels, shape, number of parameters. The example of the card runs once, and the card
    shows what it prints. Names and labels may come from untrusted files, so they are escaped.

    Args:
        folder: Folder of a saved model: of transformers, an adapter of PEFT, or of sentence-transformers.
        facts: What the folder does not say.
        model: The model, if it is one of sentence-transformers, whose own generator makes the card.

    Returns:
        False if the folder holds a card that a person wrote or edited, which stays.

    Raises:
        OSError: The folder cannot be read or written.
    """
    folder = Path(folder)
    if is_edited(folder):
        logger.warning(f"{folder / CARD} is not as it was written here, so it stays; move it away to get a new card")
        return False
    values = _values_of(folder, facts)
    values |= _metadata_of(facts, values, model)
    output = None
    if not values["is_generated"]:  # sentence-transformers runs its own examples
        paths = {"model_id": str(folder.resolve()), "base_id": facts.source}
        output = example_output(_render(values | paths, model).text)
    save_card(folder / CARD, _render(values | {"output": output}, model))
    if not values["license"]:
        logger.warning(f"{folder / CARD} names no licence: none was given, nor found at the start; give --license")
    return True


def _render(values: dict, model: BaseModel | None) -> ModelCard:
    """The card, from our template; sentence-transformers generates metadata, example and scores of its models."""
    names = ("library_name", "pipeline_tag", "tags", "license", "language", "base_model", "datasets")
    metadata, results = {name: values[name] for name in names}, values["results"]
    data = ModelCardData(**metadata)
    if model is not None:
        data = model.model_card_data
        data.first_save = False  # otherwise it asks the Hub for a base model
        data.usage_examples = None  # without texts of the training data
        data.widget, data.train_datasets, data.eval_datasets = [], [], []
        data.base_model_revision, data.similarities = None, None
        data.model_id, data.model_name = PLACEHOLDER, values["title"]
        for name, value in metadata.items():
            setattr(data, name, value)
        data.eval_results_dict = {
            evaluator: {name: value for name, value in scores.items() if RETRIEVAL.search(name)}
            for evaluator, scores in (data.eval_results_dict or {}).items()
        }
        if data.eval_results_dict:
            _, results = model_index_to_eval_results(data.format_eval_metrics()["model-index"])
            for result in results:
                result.metric_value = round(result.metric_value, 4)
                result.metric_name = (
                    re.sub("^cosine_", "", result.metric_type).replace("ndcg", "nDCG").replace("mrr", "MRR")
                )
        if not values["is_generated"]:
            values = values | {"usage_snippet": None}
    card = ModelCard.from_template(data, template_path=str(TEMPLATE), **values | {"results": results})
    if values["is_generated"]:
        model_id, python = values["model_id"], values["python"]
        card.text = card.text.replace(f'("{PLACEHOLDER}")', f"({python(model_id)}, trust_remote_code=True)")
    more = {name: values[name] for name in ("base_model_relation", "license_name", "license_link") if values[name]}
    card.data = ModelCardData(**{**card.data.to_dict(), **metadata, **more})
    if results:
        card.data.model_name, card.data.eval_results = values["title"], list(results)
        card.data.metrics = sorted({result.metric_type for result in results})
    return card


def _values_of(folder: Path, facts: CardFacts) -> dict:
    """What the template shows of a saved model, besides the metadata."""
    adapter, settings = folder / "adapter_config.json", folder / "config_sentence_transformers.json"
    is_adapter = adapter.is_file()
    kind = read_json(settings).get("model_type", "SentenceTransformer") if settings.is_file() else None
    base = read_json(adapter)["base_model_name_or_path"] if is_adapter else None
    config = AutoConfig.from_pretrained(base or folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    architecture = "ForSequenceClassification" if is_adapter else (config.architectures or ["Model"])[0]
    task = next((task for end, task in TASKS.items() if architecture.endswith(end) and not kind), "feature-extraction")
    problem_type, labels = config.problem_type, []
    if is_adapter:
        problem_type, labels = labels_of_adapter(folder)
    elif _has_classes(folder) if kind else task in ("text-classification", "token-classification"):
        task, labels = "text-classification" if kind else task, [config.id2label[i] for i in range(config.num_labels)]
    is_contextual = hasattr(config, "trained_context_size")
    return {
        "task": task,
        "kind": kind,
        "labels": labels,
        "problem_type": problem_type,
        "is_pair": facts.is_pair,
        "is_adapter": is_adapter,
        "is_contextual": is_contextual,
        "is_neobert": "neobert" in config.model_type,
        "is_generated": bool(kind) and not labels and not is_contextual,
        "config": config,
        "swiglu_width": getattr(config, "swiglu_width", None),
        "max_length": min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", math.inf)),
        "mask_token": tokenizer.mask_token,
        "model_id": facts.model_id or folder.resolve().name,
        "base_id": None if base is None else Path(base).name if Path(base).is_dir() else base,
        "title": (facts.model_id or folder.resolve().name).split("/")[-1],
        "shown": SHOWN,
        "python": partial(json.dumps, ensure_ascii=False),  # such a JSON string is also a Python string
        "markdown": markdown,
        "number": "{:,}".format,
        **_sizes_of(folder),
    }


def _has_classes(folder: Path) -> bool:
    """Whether a model of sentence-transformers ends with the layer of `add_head`, whose outputs are classes."""
    last = read_json(folder / "modules.json")[-1]
    config = read_json(folder / "config.json")
    is_layer = last["type"].endswith(".Dense") and "id2label" in config
    return is_layer and read_json(folder / last["path"] / "config.json")["out_features"] == len(config["id2label"])


def _sizes_of(folder: Path) -> dict:
    """Number of parameters and their dtype, from the headers of the files."""
    number, dtype = 0, ""
    for file in (*folder.glob("*.safetensors"), *folder.glob("[0-9]*_*/*.safetensors")):
        with safe_open(file, "pt") as stream:
            for name in stream.keys():  # noqa: SIM118  (not a dict)
                tensor = stream.get_slice(name)
                number, dtype = number + math.prod(tensor.get_shape()), dtype or tensor.get_dtype()
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    return {"num_parameters": number, "dtype": names.get(dtype, dtype)}


def _metadata_of(facts: CardFacts, values: dict, model: BaseModel | None) -> dict:
    """The metadata, and what the card of the source says: licence and language, and of a copy all that still holds."""
    text = read_card(facts.source)
    known = valid_metadata(text)
    is_hub_id = facts.source is not None and not Path(facts.source).is_dir()
    base, relation = facts.source if is_hub_id else known.get("base_model"), "finetune"
    if facts.is_copy:
        base, relation = known.get("base_model") or base, known.get("base_model_relation")
    own_name = "" if is_hub_id or facts.is_copy else _name_of_start(facts.source, text)
    link = f"[{markdown(base)}](https://huggingface.co/{base})" if base and relation else ""
    task = values["task"]
    library, tags = "peft" if values["is_adapter"] else "transformers", [task]
    if values["kind"]:
        library, tags = "sentence-transformers", ["sentence-transformers", task]
    if model is not None and task != "text-classification":
        task, tags = model.model_card_data.pipeline_tag, model.model_card_data.tags
    found = {
        "task": task,
        "library_name": library,
        "pipeline_tag": task,
        "tags": [values["config"].model_type, *(tag for tag in tags if tag != "generated_from_trainer")],
        "license": facts.license or known.get("license"),
        "license_name": None if facts.license else known.get("license_name"),
        "license_link": None if facts.license else known.get("license_link"),
        "language": list(facts.language or known.get("language") or ()) or None,
        "base_model": base,
        "base_model_relation": ("adapter" if values["is_adapter"] else relation) if base else None,
        "datasets": [*facts.datasets, *(known.get("datasets", ()) if facts.is_copy else ())] or None,
        "results": facts.results or (known.get("results", ()) if facts.is_copy else ()),
        "start": ", whose base model is ".join(filter(None, [own_name, link])),
        "training_data": _training_data(facts),
        "evaluation": "",
    }
    for name, section in (("license", "Licence"), ("language", "Limits")):
        is_of_start = not getattr(facts, name) and (not facts.is_copy or AS_OF_START in _section(text, section))
        found[f"{name}_origin"] = AS_OF_START if is_of_start else ""
    if facts.is_copy and seal_of(text) is not None:
        values["is_pair"] = '"text_pair"' in text
        if start := re.search(r" It was trained from (.*)\.$", text, re.MULTILINE):
            found["start"] = start[1]
        found |= {"training_data": _section(text, "Training data"), "evaluation": _section(text, "Evaluation")}
    found["results"] = [replace(result, task_type=result.task_type or task) for result in found["results"]]
    return found | {"sentence": _sentence(values, found)}


def _sentence(values: dict, metadata: dict) -> str:
    names, texts = len(values["labels"]), "a pair of texts" if values["is_pair"] else "a text"
    does = DOES.get(values["kind"]) or DOES.get(values["task"])
    if values["task"] == "text-classification":
        does = f"puts {texts} into one of {names} classes"
        if values["problem_type"] == "regression":
            does = f"predicts a number for {texts}"
        elif values["problem_type"] == "multi_label_classification":
            does = f"says which of {names} classes {texts} has"
    if values["is_contextual"]:
        does = "turns a text into a vector that depends on its corpus, of which the model reads a sample first"
    what = "A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587))"
    if not values["is_neobert"]:
        what = f"An encoder of the type {markdown(values['config'].model_type)}"
    if values["is_adapter"]:
        what = f"An adapter (LoRA) for {what[0].lower()}{what[1:]}"
    sentence = f"{what} that {does}."
    return f"{sentence} It was trained from {metadata['start']}." if metadata["start"] else sentence


def _name_of_start(source: str | None, text: str) -> str:
    """How a card names a start, in Markdown: by its id on the Hub, or by the title of its card, `text`; empty without a title."""
    if source is None or not Path(source).is_dir():
        return markdown(source or "")
    if Path(source).resolve() == Path(MINI_MODEL_PATH).resolve():
        return markdown("the mini model of neobert_hf")
    title = re.match(r"(?:---\n.*?\n---\s+)?# ([^\n]+)", text, re.DOTALL)
    return markdown(html.unescape(title[1].replace("\\", ""))) if title else ""


def write_start_card(folder: str | Path, source: str, change: str) -> None:
    """Write a short card for a model that was changed before its training, whose card takes the origin from it.

    Args:
        folder: Folder of the changed model.
        source: Folder or Hub id of the model that was changed.
        change: What its name on the card ends with, such as "with a new vocabulary".

    Raises:
        OSError: The file cannot be written.
    """
    text = read_card(source)
    known = valid_metadata(text)
    base = known.get("base_model") if Path(source).is_dir() else source
    names = ("license", "license_name", "license_link", "language")
    data = ModelCardData(base_model=base, **{name: known.get(name) for name in names})
    name = _name_of_start(source, text) or "a model"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {name} {change}\n").save(Path(folder, CARD))


def _training_data(facts: CardFacts) -> str:
    lines = []
    for name, number in list(facts.rows.items())[:SHOWN]:
        shown = f"[{markdown(name)}](https://huggingface.co/datasets/{name})"
        shown = shown if name in facts.datasets else markdown(Path(name).name)
        lines.append(f"- {shown}" + ("" if number is None else f": {number:,} rows"))
    if len(facts.rows) > SHOWN:
        lines.append(f"- and {len(facts.rows) - SHOWN:,} others")
    return "\n".join([*lines, "", facts.remark] if facts.remark else lines).strip()


def _section(text: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""


def markdown(text: str) -> str:
    """Escape `text` as one line of plain Markdown text, without markup, HTML or table cells."""
    return re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def example_output(card: str) -> str | None:
    """Run the example of a card, its first block of Python, and return what it prints; None, with a warning, if it fails.

    It runs in this process, so it needs the memory of one more model, and no second import of the libraries. Verbosity and random
    numbers stay as they were. On a GPU without that much memory it fails, and the training keeps its model and a card.
    """
    (code, *_) = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    printed, before = io.StringIO(), logging.get_verbosity()
    try:
        logging.set_verbosity_error()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(io.StringIO()),
            torch.random.fork_rng(devices=()),  # new layers below an adapter are initialized on the CPU
        ):
            exec(compile(code, CARD, "exec"), {})
    except Exception as error:  # a card without the output is better than a training without a card
        logger.warning(f"the example of the card did not run ({error}), so the card does not show what it prints")
        return None
    finally:
        logging.set_verbosity(before)
    lines = [line[:120] for line in printed.getvalue().splitlines()[:20]]
    return "\n".join(lines).replace("```", "'''").strip() or None
