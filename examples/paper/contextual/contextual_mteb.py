"""MTEB for contextual models: each task has its own context, from the data that a user would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from contextual_embeddings import contextual_model, fit_context, is_contextual
from mteb.models.abs_encoder import get_prompt_name
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer


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


@contextmanager
def in_contexts(model: SentenceTransformer, tasks: list) -> Iterator:
    """Return the wrapper class for `mteb_scores.evaluate`, None for a plain model; a context is restored at the end."""
    if not isinstance(model, SentenceTransformer) or not is_contextual(model):  # or a baseline of mteb
        yield None
        return
    contextual = contextual_model(model)
    context = contextual.context if contextual.config.has_context else None
    contextual.set_context(None)
    try:
        yield partial(ContextualEncoder, tasks=tasks)
    finally:
        contextual.set_context(context)
