"""MTEB(eng, v1) as in the paper (section 5.2, appendix D): instructions, categories, and averages over complete sets of tasks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mteb
from huggingface_hub import EvalResult
from mteb.models.abs_encoder import get_prompt_name
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from neobert_hf import fit_context
from neobert_hf.embeddings.contextual import contextual_model, is_contextual
from neobert_hf.embeddings.instructions import mteb_prompts
from neobert_hf.embeddings.models import fingerprint
from neobert_hf.runs.card_files import editing_card

BENCHMARK = "MTEB(eng, v1)"
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


class ContextualEncoder(SentenceTransformerEncoderWrapper):
    """mteb's wrapper for a contextual model: each task has its own context, from the data that a user would have.

    The context is a sample of: the corpus (retrieval, reranking); the training split (classification); both columns of sentences
    (STS); the texts that are embedded first (all others). mteb's own wrapper for contextual models fails for retrieval in 2.26,
    and does not know local tasks.

    Args:
        model: A contextual model.
        tasks: The tasks that will be evaluated.

    Source: paper, appendix G.2; the choice of texts is that of CDE's evaluation, but with the training split for classification.
    """

    def __init__(self, model: SentenceTransformer, tasks: list) -> None:
        super().__init__(model)
        parts = [part for task in tasks for part in getattr(task, "tasks", [task])]  # an aggregate has tasks of its own
        self.tasks = {task.metadata.name: task for task in parts}
        self.fitted = None

    def encode(self, inputs, *, task_metadata, hf_split, hf_subset, prompt_type=None, **kwargs):
        """Fit the context at the first call for a split of a task, and embed."""
        key = (task_metadata.name, hf_split, hf_subset)
        if key != self.fitted:
            documents = context_documents(self.tasks[task_metadata.name], hf_split, hf_subset)
            documents = documents or [text for batch in inputs for text in batch["text"]]
            prompts = self.model_prompts or {}
            name = get_prompt_name(prompts, task_metadata, PromptType.document)
            fit_context(self.model, documents, prompt=prompts.get(name, ""))
            self.fitted = key
        options = dict(task_metadata=task_metadata, hf_split=hf_split, hf_subset=hf_subset, prompt_type=prompt_type)
        return super().encode(inputs, **options, **kwargs)


def context_documents(task, split: str, subset: str) -> list[str] | None:
    """Return the texts that a task's context is sampled from; None if they are the embedded texts themselves."""
    data = task.dataset.get(subset, task.dataset)
    if task.metadata.type in ("Retrieval", "Reranking"):
        corpus = data[split]["corpus"]
        titles = corpus["title"] if "title" in corpus.column_names else [""] * len(corpus)
        return [f"{title} {text}".strip() for title, text in zip(titles, corpus["text"])]
    if task.metadata.type == "Classification":
        return list(data[task.train_split][task.input_column_name])
    if task.metadata.type == "STS":
        return [text for column in task.column_names for text in data[split][column]]
    return None


def evaluate(
    model: SentenceTransformer,
    tasks: list,
    output_dir: str | Path,
    model_name: str,
    prompts: dict[str, str] | None = None,
    batch_size: int = 32,
) -> list[Score]:
    """Run tasks; skip tasks whose results for the same model and prompts are in `output_dir`.

    The key of a result is the model's name and a hash of its weights, prompts, dtype and length. So a model never gets the cached
    scores of another model; mteb alone would confuse two local folders.

    Args:
        model: Embedding model; a contextual one gets a context from each task (see `ContextualEncoder`).
        tasks: Tasks of `benchmark_tasks`, or any tasks of mteb.
        output_dir: Folder of the results, one file for each task.
        model_name: Name of the form organisation/name.
        prompts: Prompts by the names that mteb looks up; by default the paper's. `{}` uses none, not even the model's own.
        batch_size: Number of texts per forward.

    Raises:
        ValueError: The name does not have the form organisation/name.
    """
    if not re.fullmatch("[^/]+/[^/]+", model_name):
        raise ValueError(f"model_name={model_name!r} does not have the form organisation/name; give such a name")
    prompts = mteb_prompts() if prompts is None else prompts
    contextual = contextual_model(model) if is_contextual(model) else None
    context = contextual.context if contextual and contextual.config.has_context else None
    if contextual:
        contextual.set_context(None)
    wrapper = ContextualEncoder(model, tasks) if contextual else SentenceTransformerEncoderWrapper(model)
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
        if contextual:
            contextual.set_context(context)
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
    with editing_card(card) as loaded:
        loaded.data.model_name = model_name
        kept = [result for result in loaded.data.eval_results or [] if result.dataset_name not in replaced]
        loaded.data.eval_results = kept + new
