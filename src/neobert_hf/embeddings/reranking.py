"""Rerankers: cross-encoders, which read a question and a document together, on sentence-transformers' trainer and losses."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
)
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.util import semantic_search

from neobert_cli.parser import option

from ..checkpoints import MINI_MODEL_PATH
from ..checkpoints.embedding_models import warn_of_truncated
from ..checkpoints.saved_model import SavedModel
from ..checkpoints.tokenizer import keep_known_settings
from ..data.lengths import DEFAULT_LENGTH
from ..files.messages import say
from ..runs import ResumeArguments, default_learning_rate
from ..runs.progress import without_bars
from .contrastive import mine_negatives
from .pairs import Sets, as_sets
from .training import PairArguments, PairTrainer, train_and_record


@dataclass
class RerankerArguments(PairArguments):
    """Model and data of the training of a reranker."""

    embedding_model: str = option("Embedding model that finds negatives and candidates.", MINI_MODEL_PATH)
    num_negatives: int = option("Wrong answers to each question, which the embedding model ranks first.", 4)
    num_candidates: int = option("Documents to rerank for each question of the evaluation.", 20)


@dataclass
class RerankerTrainingArguments(ResumeArguments, CrossEncoderTrainingArguments):
    """Training arguments; the learning rate follows from the size of the model."""

    num_train_epochs: float = 1
    per_device_train_batch_size: int = 32
    learning_rate: float | None = option("Default: by the size of the model.")
    warmup_steps: float = 0.1  # share of all steps
    logging_steps: float = 0.05  # share of all steps
    save_steps: float = 500


class RerankerTrainer(PairTrainer, CrossEncoderTrainer):
    """sentence-transformers' trainer with a manifest in each checkpoint; it does not train weights of words."""


def open_reranker(name: str, max_seq_length: int | None = None) -> CrossEncoder:
    """Open a model as a cross-encoder with one score, whose head may be new.

    Args:
        name: Folder or id on the Hub.
        max_seq_length: Length in tokens at which a pair is truncated; by default that of the tokenizer, at most 512.

    Raises:
        ValueError: The folder or the id is not a model's, or as of `SavedModel.check`.
        OSError: The folder or the Hub holds no such model.
    """
    SavedModel(name).check()
    options = {"dtype": torch.float32, "ignore_mismatched_sizes": True}  # of a head with several labels
    with without_bars(is_head_new=True):
        model = CrossEncoder(name, num_labels=1, model_kwargs=options)
    model[0].processor = keep_known_settings(model.tokenizer, name)
    model.max_seq_length = max_seq_length or min(model.max_seq_length, DEFAULT_LENGTH)
    return model


def labelled_pairs(sets: Sets, model: SentenceTransformer, num_negatives: int) -> DatasetDict:
    """Return each pair with label 1, and each question with the most similar other documents of its set with label 0.

    Args:
        sets: Pairs by name, as `read_sets_of_pairs` returns them.
        model: Embedding model that ranks the documents.
        num_negatives: Documents with label 0 for each question, fewer in a small set.

    Raises:
        ValueError: A set has negatives of its own, or no document beside the right ones.
    """
    labelled = mine_negatives(sets, model, num_negatives, output_format="labeled-pair", verbose=False)
    for name, rows in labelled.items():
        if all(rows["label"]):
            raise ValueError(f"{name} has no document that is wrong for a question; give more pairs")
    return labelled


def reranking_loss(model: CrossEncoder, sets: Sets) -> BinaryCrossEntropyLoss:
    """Return the binary cross-entropy in which right and wrong documents have the same weight in total."""
    labels = [label for rows in as_sets(sets, "train").values() for label in rows["label"]]
    return BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(labels.count(0) / labels.count(1)))


def reranking_evaluator(
    pairs: Dataset, documents: Iterable[str], model: SentenceTransformer, name: str, num_candidates: int
) -> CrossEncoderRerankingEvaluator:
    """Return an evaluator of nDCG@10, MRR@10 and MAP before (`base_`) and after reranking.

    Args:
        pairs: Questions and right answers, in the first two columns.
        documents: Documents beside the answers.
        model: Embedding model, whose first documents are reranked. A question whose answer is not among them scores 0.
        name: Prefix of each metric's name.
        num_candidates: Number of documents to rerank for each question.
    """
    question, answer = pairs.column_names[:2]
    answers: dict[str, list[str]] = {}
    for query, document in zip(pairs[question], pairs[answer]):
        answers.setdefault(query, []).append(document)
    corpus = list(dict.fromkeys([*pairs[answer], *documents]))
    warn_of_truncated(model, f"candidates of {name}", [*answers, *corpus])
    ranked = semantic_search(model.encode_query(list(answers)), model.encode_document(corpus), top_k=num_candidates)
    samples = [
        {"query": query, "positive": right, "documents": [corpus[hit["corpus_id"]] for hit in hits]}
        for (query, right), hits in zip(answers.items(), ranked)
    ]
    return CrossEncoderRerankingEvaluator(
        samples, always_rerank_positives=False, name=name, write_csv=False, show_progress_bar=sys.stderr.isatty()
    )


def train_reranker(
    model: CrossEncoder,
    pairs: Sets,
    retriever: SentenceTransformer,
    training: RerankerTrainingArguments,
    arguments: RerankerArguments | None = None,
    held_out: Sets | None = None,
) -> list[dict]:
    """Train a reranker on pairs of question and answer, in the folder `training.output_dir`, and save it there.

    Args:
        model: A cross-encoder with one score, as of `open_reranker`.
        pairs: Questions and answers by name of the set; a single set has the name train.
        retriever: Embedding model that finds the wrong answers and the candidates of the evaluation.
        training: Training arguments.
        arguments: Number of wrong answers and of candidates, and the files, which identify the run.
        held_out: Pairs to evaluate on before and after the training, by name; all answers are the documents.

    Returns:
        As `train_and_record`; names in `before` that begin with `base_` are metrics of the retriever alone.

    Raises:
        FileExistsError: The folder holds another model or checkpoints of another run.
        ValueError: A set has no wrong answers, or as of `train_and_record`.
    """
    arguments = arguments or RerankerArguments(model[0].model.name_or_path)
    pairs, held_out = as_sets(pairs, "train"), as_sets(held_out or {}, "held_out")
    sets = labelled_pairs(pairs, retriever, arguments.num_negatives)
    answers = (part[part.column_names[1]] for part in (*pairs.values(), *held_out.values()))
    documents = sorted(set().union(*answers))
    rows = {name: sum(part["label"]) for name, part in sets.items()}
    num_right = sum(rows.values())
    num_wrong = sum(map(len, sets.values())) - num_right
    say(f"{num_right:,} pairs, {num_wrong:,} negatives")
    for name, part in (*sets.items(), *held_out.items()):
        texts = list(zip(*(part[column] for column in part.column_names[:2])))
        warn_of_truncated(model, f"{len(part):,} rows of {name}", texts)
    training.learning_rate = training.learning_rate or default_learning_rate(model.config)
    evaluators = [
        reranking_evaluator(part, documents, retriever, name, arguments.num_candidates)
        for name, part in held_out.items()
    ]
    scores = train_and_record(
        RerankerTrainer,
        model,
        training,
        sets,
        reranking_loss(model, sets),
        evaluators,
        arguments,
        files=[retriever[0].model.name_or_path],
        rows=rows,
        remark=f"An embedding model found {num_wrong:,} wrong answers to the questions.",
    )
    for score in scores:
        found = score["metrics"]["ndcg@10"]
        base = score["before"]["base_ndcg@10"]
        line = f"{score['dataset']}: nDCG@10 {base:.4f} of the embedding model alone"
        if found <= base:
            line += "; the reranker is not better: leave it out, or train a trained cross-encoder"
        say(line)
    return scores
