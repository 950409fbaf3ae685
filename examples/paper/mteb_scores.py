"""MTEB(eng, v1) as in the paper (section 5.2, appendix D): instructions, categories, and averages over complete sets of tasks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mteb
from huggingface_hub import EvalResult, ModelCard
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from sentence_transformers import SentenceTransformer

from neobert_hf.embeddings import fingerprint, read_yaml

BENCHMARK = "MTEB(eng, v1)"
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
    """Main score of a task, 0 to 100."""

    task: str
    type: str
    metric: str
    score: float
    dataset: str


def benchmark_tasks(names: Sequence[str] | None = None) -> list:
    """Return tasks of MTEB(eng, v1), English only: the named tasks, or all 56.

    Raises:
        ValueError: A name is not a task of the benchmark.
    """
    tasks = {task.metadata.name: task for task in mteb.get_benchmark(BENCHMARK).tasks}
    if names is None:
        return list(tasks.values())
    if unknown := [name for name in names if name not in tasks]:
        raise ValueError(f"{', '.join(unknown)}: not in {BENCHMARK}; choose among {', '.join(sorted(tasks))}")
    return [tasks[name] for name in names]


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
    instructions, prompts = read_yaml(INSTRUCTIONS), {}
    for kind, tasks in instructions.items():
        for task, text in tasks.items():
            prompt = template.replace("{instruction}", text)
            if kind == "others":
                prompts[task] = prompt
            else:
                prompts |= {f"{task}-query": prompt, f"{task}-document": prompt if sides == "both" else ""}
    return prompts


def evaluate(
    model: SentenceTransformer,
    tasks: list,
    output_dir: str | Path,
    model_name: str,
    prompts: dict[str, str] | None = None,
    batch_size: int = 32,
    wrapper_class: Callable[[SentenceTransformer], SentenceTransformerEncoderWrapper] | None = None,
) -> list[Score]:
    """Run tasks; skip tasks whose results for the same model and prompts are in `output_dir`.

    The key of a result is the model's name and a hash of its weights, prompts, dtype and length. So a model never gets the cached
    scores of another model; mteb alone would confuse two local folders.

    Args:
        model: Embedding model.
        tasks: Tasks of `benchmark_tasks`, or any tasks of mteb.
        output_dir: Folder of the results, one file for each task.
        model_name: Name of the form organisation/name.
        prompts: Prompts by the names that mteb looks up; by default the paper's. `{}` uses none, not even the model's own.
        batch_size: Number of texts per forward.
        wrapper_class: mteb's wrapper of the model; by default that of sentence-transformers.

    Raises:
        ValueError: The name does not have the form organisation/name.
    """
    if not re.fullmatch("[^/]+/[^/]+", model_name):
        raise ValueError(f"model_name={model_name!r} does not have the form organisation/name; give such a name")
    prompts = mteb_prompts() if prompts is None else prompts
    wrapper = (wrapper_class or SentenceTransformerEncoderWrapper)(model)
    wrapper.model_prompts = prompts  # the constructor drops names that mteb does not know, and warns without cause
    own = model.prompts, model.default_prompt_name
    model.prompts, model.default_prompt_name = {}, None  # otherwise they would apply to tasks without a prompt
    try:
        meta = {"name": model_name, "revision": fingerprint(model, prompts)}
        wrapper.mteb_model_meta = wrapper.mteb_model_meta.model_copy(update=meta)
        result = mteb.evaluate(
            wrapper,
            tasks,
            cache=mteb.ResultCache(output_dir),
            encode_kwargs={"batch_size": batch_size},
            co2_tracker=False,
        )
    finally:
        model.prompts, model.default_prompt_name = own
    known = {task.metadata.name: task.metadata for task in tasks}
    scores = {done.task_name: 100 * float(done.get_score()) for done in result.task_results}
    return [
        Score(name, known[name].type, known[name].main_score, score, known[name].dataset["path"])
        for name, score in scores.items()
    ]


def averages(scores: list[Score]) -> tuple[dict[str, float | None], list[str]]:
    """Return the columns of Table 4: the mean of each category, and of all 56 tasks.

    Returns:
        Means by column, None for a column with missing tasks, and the names of the missing tasks.
    """
    by_task = {score.task: score.score for score in scores}
    tasks = benchmark_tasks()
    missing = sorted(task.metadata.name for task in tasks if task.metadata.name not in by_task)
    columns = {}
    for column, task_type in CATEGORIES.items():
        names = [task.metadata.name for task in tasks if task.metadata.type == task_type]
        columns[column] = _mean([by_task.get(name) for name in names])
    columns["Avg."] = _mean([by_task.get(task.metadata.name) for task in tasks])
    return columns, missing


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
