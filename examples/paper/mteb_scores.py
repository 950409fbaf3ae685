"""Benchmarks of mteb: prompts, scores, and averages over complete sets of tasks, as in the paper (section 5.2, appendix D)."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import datasets
import mteb
import yaml
from datasets.load import CachedDatasetModuleFactory
from huggingface_hub import EvalResult, ModelCard
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from sentence_transformers import SentenceTransformer

from neobert_hf.embeddings import fingerprint

BENCHMARK = "MTEB(eng, v1)"  # the paper's
INSTRUCTIONS = Path(__file__).parent / "embeddings/instructions.yaml"
# The columns of Table 4, and the task types of mteb.
CATEGORIES = {
    "Class.": "Classification",
    "Clust.": "Clustering",
    "PairClass.": "PairClassification",
    "Rerank.": "Reranking",
    "Retriev.": "Retrieval",
    "STS": "STS",
    "Summ.": "Summarization",
}


@dataclass(frozen=True)
class Score:
    """Main score of a task, 0 to 100, and the seconds of its evaluation, without those in which its data are loaded."""

    task: str
    type: str
    metric: str
    score: float
    dataset: str
    seconds: float | None = None


def names_of(models: Sequence[str], names: Sequence[str] | None = None) -> list[str]:
    """Return the names of the results of models; by default `local/` and the name of the folder.

    Raises:
        ValueError: Two models have one name, or a model has none.
    """
    default = (each if each.startswith("mteb/baseline-") else f"local/{Path(each).resolve().name}" for each in models)
    names = list(names or default)
    if not len({*names}) == len(names) == len(models):
        raise ValueError(
            f"{len(models)} models have the names {', '.join(names)}; give --model_names, one for each model"
        )
    return names


def benchmark_tasks(names: Sequence[str] | None = None, benchmark: str | mteb.Benchmark = BENCHMARK) -> list[AbsTask]:
    """Return tasks of a benchmark, in its languages: the named tasks, or all of them.

    Raises:
        ValueError: mteb has no benchmark of this name, or a name is not a task of it.
    """
    try:
        found = mteb.get_benchmark(benchmark) if isinstance(benchmark, str) else benchmark
    except KeyError:
        known = [*(each.name for each in mteb.get_benchmarks()), "NeoBERT(offline)"]
        raise ValueError(f"mteb has no benchmark {benchmark!r}; {_similar(benchmark, known)}") from None
    tasks = {task.metadata.name: task for task in found.tasks}
    if names is None:
        return list(tasks.values())
    if unknown := [name for name in names if name not in tasks]:
        raise ValueError(f"{', '.join(unknown)}: not in {found.name}; {_similar(unknown[0], list(tasks))}")
    return [tasks[name] for name in names]


def _similar(name: str, known: list[str]) -> str:
    """The known names that are similar to a name, whatever their case; all of them if none is."""
    by_lower = {each.lower(): each for each in known}
    found = [by_lower[lower] for lower in get_close_matches(name.lower(), by_lower)]
    return f"similar: {', '.join(found)}" if found else f"choose among {', '.join(sorted(known))}"


def parts_of(task: AbsTask) -> list[AbsTask]:
    """Return the tasks that a task aggregates, or the task itself."""
    return list(getattr(task, "tasks", [task]))


def is_here(task: AbsTask) -> bool:
    """Return whether the datasets of a task are on this machine: in the cache of datasets, or in a folder."""
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_error()
    try:
        for path in (part.metadata.dataset["path"] for part in parts_of(task)):
            _ = Path(path).exists() or CachedDatasetModuleFactory(path).get_module()
    except FileNotFoundError:
        return False
    finally:
        datasets.logging.set_verbosity(verbosity)
    return True


def about(tasks: Sequence[AbsTask]) -> dict:
    """Say which tasks need no network; return types, numbers of texts as mteb counts them, and revisions of the datasets."""
    here = [task.metadata.name for task in tasks if is_here(task)]
    print(
        f"{len(here)} of {len(tasks)} tasks have their data on this machine{': ' * bool(here)}{', '.join(here)}",
        flush=True,
    )
    types, counts = {}, {}
    for metadata in (task.metadata for task in tasks):
        splits = metadata.n_samples or {}
        types[metadata.name] = metadata.type
        counts[metadata.name] = sum(splits[name] for name in metadata.eval_splits if name in splits) or None
    revisions = {task.metadata.name: task.metadata.dataset["revision"] for task in tasks}
    return {"types": types, "num_texts": counts, "dataset_revisions": revisions}


def mteb_prompts(template: str = "{instruction} ", sides: str = "both") -> dict[str, str]:
    """Return the paper's prompts by the names that mteb looks up.

    They are `TASK`, or `TASK-query` and `TASK-document` for retrieval and reranking.

    Args:
        template: Text before each input; the paper does not say what separates instruction and input.
        sides: "both" puts the instruction before queries and documents, as in the authors' evaluation; "query" before queries
            only.

    Raises:
        ValueError: The template does not contain `{instruction}`.
    """
    if "{instruction}" not in template:
        raise ValueError(f"the template {template!r} does not contain {{instruction}}; add it")
    instructions = yaml.safe_load(INSTRUCTIONS.read_text("utf-8"))
    prompts = {}
    for kind, tasks in instructions.items():
        for task, text in tasks.items():
            prompt = template.replace("{instruction}", text)
            if kind == "others":
                prompts[task] = prompt
            else:
                prompts |= {f"{task}-query": prompt, f"{task}-document": prompt if sides == "both" else ""}
    return prompts


def prompts_for(
    model: SentenceTransformer,
    tasks: Sequence[AbsTask],
    choice: str = "auto",
    template: str = "{instruction} ",
    sides: str = "both",
) -> tuple[str, Mapping[str, str] | Literal["model"]]:
    """Return whose prompts a model gets, in words, and the prompts as `evaluate` takes them.

    Args:
        model: Embedding model; or a baseline of mteb, which gets none.
        tasks: The tasks that will be evaluated; the paper has instructions for some.
        choice: "paper", "model", "none", or "auto": the model's own prompts if it has some, else the paper's for a NeoBERT, and
            none for another model.
        template: As of `mteb_prompts`.
        sides: As of `mteb_prompts`.
    """
    if not isinstance(model, SentenceTransformer):
        return "none", {}
    has_own = bool(model.default_prompt_name or any(model.prompts.values()))
    if choice == "auto":
        is_ours = "neobert" in getattr(getattr(model[0], "config", None), "model_type", "")
        choice = "model" if has_own else "paper" if is_ours else "none"
    if choice == "model":
        return "the model's" if has_own else "none", "model"
    prompts = mteb_prompts(template, sides) if choice == "paper" else {}
    names = {name.removesuffix("-query") for name in prompts}
    known = sum(all(part.metadata.name in names for part in parts_of(task)) for task in tasks)
    some = "the paper's" if known == len(tasks) else f"the paper's, for {known} of {len(tasks)} tasks"
    return some if known else "none", prompts


def evaluate(
    model: SentenceTransformer,
    tasks: Sequence[AbsTask],
    output_dir: str | Path,
    model_name: str,
    prompts: Mapping[str, str] | Literal["model"] | None = None,
    batch_size: int = 32,
    wrapper_class: Callable[[SentenceTransformer], SentenceTransformerEncoderWrapper] | None = None,
    on_missing: Callable[[str, str], None] | None = None,
) -> list[Score]:
    """Run tasks; skip tasks whose results for the same model, prompts and data are in `output_dir`.

    The key of a result is the model's name and a hash of its weights, prompts, dtype and length. So a model never gets the cached
    scores of another model; mteb alone would confuse two local folders.

    Args:
        model: Embedding model; or a baseline of mteb, such as `mteb.get_model("mteb/baseline-bm25s")`.
        tasks: Tasks of `benchmark_tasks`, or any tasks of mteb.
        output_dir: Folder of the results, one file for each task.
        model_name: Name of the form organisation/name.
        prompts: Prompts by the names that mteb looks up; by default the paper's. `{}` uses none, not even the model's own;
            "model" uses its own.
        batch_size: Number of texts per forward.
        wrapper_class: mteb's wrapper of the model; by default that of sentence-transformers.
        on_missing: Called with the name of a task that cannot run here, and the reason; by default that is an error.

    Raises:
        ValueError: The name does not have the form organisation/name; or a task does not suit the model.
        ConnectionError: The data of a task are not in the cache, and there is no network.
    """
    if not re.fullmatch("[^/]+/[^/]+", model_name):
        raise ValueError(f"model_name={model_name!r} does not have the form organisation/name; give such a name")
    scores, cache = [], mteb.ResultCache(output_dir)
    with _wrapped(model, model_name, mteb_prompts() if prompts is None else prompts, wrapper_class) as wrapper:
        for task in tasks:
            try:
                scores.append(_score(wrapper, task, cache, batch_size))
            except _CannotRun as error:
                if on_missing is None:
                    raise error.__cause__ or ValueError(f"{task.metadata.name}: {error}") from None
                on_missing(task.metadata.name, str(error))
    return scores


class _CannotRun(Exception):
    """A task does not suit the model, or its data are not here."""


@contextmanager
def _wrapped(model, name: str, prompts: Mapping[str, str] | str, wrapper_class) -> Iterator:
    """Give mteb's wrapper of a model, with its prompts and the key of its results; the model is as before at the end."""
    if not isinstance(model, SentenceTransformer):  # a baseline of mteb has no prompts, and a key of its own
        yield model
        return
    wrapper, own = (
        (wrapper_class or SentenceTransformerEncoderWrapper)(model),
        (model.prompts, model.default_prompt_name),
    )
    if prompts != "model":
        wrapper.model_prompts = prompts  # the constructor drops names that mteb does not know, and warns without cause
        model.prompts, model.default_prompt_name = {}, None  # otherwise they would apply to tasks without a prompt
    try:
        meta = {"name": name, "revision": fingerprint(model, {} if prompts == "model" else prompts)}
        wrapper.mteb_model_meta = wrapper.mteb_model_meta.model_copy(update=meta)
        yield wrapper
    finally:
        model.prompts, model.default_prompt_name = own


def _score(wrapper, task: AbsTask, cache: mteb.ResultCache, batch_size: int) -> Score:
    """Return the score of a task, from the cache if it holds all of it."""
    options = {"cache": cache, "encode_kwargs": {"batch_size": batch_size}, "co2_tracker": False}
    for part in parts_of(task):
        done = cache.load_task_result(part.metadata.name, wrapper.mteb_model_meta)
        if done and done.dataset_revision != part.metadata.revision:  # mteb would keep it
            options["overwrite_strategy"], done = "always", None
        if done is None or done.get_missing_evaluations(part):
            _load(wrapper, part)
            mteb.evaluate(wrapper, part, **options)
            part.unload_data()
    metadata = task.metadata
    options["overwrite_strategy"] = "only-missing"
    (done,) = mteb.evaluate(wrapper, task, **options).task_results  # from the cache, or the mean of the parts
    score = 100 * float(done.validate_and_filter_scores(task).get_score())  # without splits of another benchmark
    seconds = done.evaluation_time
    seconds = None if seconds is None or math.isnan(seconds) else seconds
    path = Path(metadata.dataset["path"])
    dataset = path.name if path.exists() else metadata.dataset["path"]  # no folder of this machine
    return Score(metadata.name, metadata.type, metadata.main_score, score, dataset, seconds)


def _load(wrapper, task: AbsTask) -> None:
    """Load the data of a task that suits the model.

    Raises:
        _CannotRun: Otherwise, with the reason in one line.
    """
    if other := set(task.metadata.modalities) - {"text"}:
        raise _CannotRun(f"it has {', '.join(sorted(other))}, and the model reads text")
    if not hasattr(wrapper, "encode") and not isinstance(task, AbsTaskRetrieval):
        raise _CannotRun(f"{wrapper.mteb_model_meta.name} searches, and gives no vectors")
    try:
        task.load_data()
    except Exception as error:  # of any dataset of other people: the other tasks run
        reason = " ".join(str(error).split()) or type(error).__name__
        what = "need the network" if isinstance(error, ConnectionError) else "do not load"
        raise _CannotRun(f"its data {what}: {reason}") from error
    if "Reranking" in task.metadata.type:
        parts = [split for subset in task.dataset.values() for split in subset.values()]
        if any(part["top_ranked"] is None for part in parts):  # mteb 2.26 would search the whole corpus in silence
            task.unload_data()
            raise _CannotRun("its data need the network: mteb does not read the candidates of reranking from the cache")


def averages(scores: list[Score], tasks: Sequence[AbsTask] | None = None) -> tuple[dict[str, float | None], list[str]]:
    """Return the mean of each type of task, and of all tasks; by default the columns of Table 4, over its 56 tasks.

    Returns:
        Means by column, None for a column with missing tasks, and the names of the missing tasks.
    """
    by_task = {score.task: score.score for score in scores}
    types = {task.metadata.name: task.metadata.type for task in (benchmark_tasks() if tasks is None else tasks)}
    columns = {kind: column for column, kind in CATEGORIES.items() if kind in types.values()}
    columns |= {kind: kind for kind in sorted({*types.values()} - {*columns})}
    means = {
        column: _mean([by_task.get(name) for name in types if types[name] == kind]) for kind, column in columns.items()
    }
    means["Avg."] = _mean([by_task.get(name) for name in types])
    return means, sorted(types.keys() - by_task.keys())


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else statistics.mean(values)


def write_model_index(card: str | Path, model_name: str, scores: list[Score]) -> None:
    """Write the scores into the metadata of a model card, in the Hub's format; other results on the card are kept.

    Raises:
        ValueError: The card does not exist.
    """
    new = [
        EvalResult(s.type, s.dataset, f"MTEB {s.task}", s.metric, round(s.score, 4), task_name=s.type) for s in scores
    ]
    replaced = {result.dataset_name for result in new}
    loaded = ModelCard.load(card)
    loaded.data.model_name = model_name
    kept = [result for result in loaded.data.eval_results or [] if result.dataset_name not in replaced]
    loaded.data.eval_results = kept + new
    loaded.save(card)
