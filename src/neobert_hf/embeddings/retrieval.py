"""Retrieval evaluation on pairs of query and document, with sentence-transformers' evaluator."""

import sys
from collections.abc import Iterable

from datasets import Dataset
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from .pairs import Sets, as_sets


def pairs_evaluator(
    pairs: Dataset, name: str, distractors: Iterable[str] = (), **prompts: str | None
) -> InformationRetrievalEvaluator:
    """Return an evaluator of recall@1, recall@10, MRR@10 and nDCG@10.

    For each query (first column), it ranks all documents (second column and distractors); the paired document is correct.

    Args:
        pairs: Two columns, as `read_pairs` returns them.
        name: Prefix of each metric's name.
        distractors: Additional documents to rank.
        prompts: `query_prompt` and `corpus_prompt`, the texts before queries and documents; by default those of the model.
    """
    question, answer = pairs.column_names[:2]
    answers, questions = list(pairs[answer]), list(pairs[question])
    number = {text: str(i) for i, text in enumerate(dict.fromkeys([*answers, *distractors]))}
    return InformationRetrievalEvaluator(
        queries={str(i): text for i, text in enumerate(questions)},
        corpus={i: text for text, i in number.items()},
        relevant_docs={str(i): {number[text]} for i, text in enumerate(answers)},
        accuracy_at_k=[1, 10],
        precision_recall_at_k=[1, 10],
        map_at_k=[10],
        batch_size=64,
        show_progress_bar=sys.stderr.isatty(),
        name=name,
        write_csv=False,
        **prompts,
    )


def pairs_evaluators(sets: Sets) -> list[InformationRetrievalEvaluator]:
    """Return an evaluator of the pairs of each set, with the prompts of the model."""
    return [pairs_evaluator(pairs, name) for name, pairs in as_sets(sets, "held_out").items()]
