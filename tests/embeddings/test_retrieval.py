"""Retrieval metrics equal those computed by hand."""

import numpy as np
import pytest

pytest.importorskip(
    "sentence_transformers", reason="retrieval embeds by sentence-transformers (pip install -e .[embed])"
)

from conftest import SENTENCE
from datasets import Dataset

from neobert_hf.embeddings import pairs_evaluator, pairs_evaluators, sentence_transformer


def test_the_metrics_equal_those_computed_from_the_ranks(folder):
    model = sentence_transformer(folder)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(SENTENCE.split(), 5)) for _ in range(80)]
    pairs = Dataset.from_dict({"question": texts[:30], "answer": texts[30:60]})
    found = pairs_evaluator(pairs, "some", distractors=texts[60:])(model)
    vectors = model.encode(texts, normalize_embeddings=True)
    scores = vectors[:30] @ vectors[30:].T
    ranks = (scores > scores[np.arange(30), np.arange(30), None]).sum(1) + 1
    expected = {
        "recall@1": np.mean(ranks == 1),
        "recall@10": np.mean(ranks <= 10),
        "mrr@10": np.mean(np.where(ranks <= 10, 1 / ranks, 0)),
        "ndcg@10": np.mean(np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0)),
    }
    assert len(set(ranks)) > 10
    for name, value in expected.items():
        assert abs(found[f"some_cosine_{name}"] - value) < 1e-9, name


def test_the_prompt_of_a_set_is_before_its_texts(folder):
    model = sentence_transformer(folder)
    rng = np.random.default_rng(0)
    questions, answers = ([" ".join(rng.choice(SENTENCE.split(), 5)) for _ in range(40)] for _ in range(2))
    pairs = Dataset.from_dict({"anchor": questions, "positive": answers})
    for sides in ("both", "query"):
        (evaluator,) = pairs_evaluators({"set": pairs}, {"set": "the old house "}, sides)
        texts = [f"the old house {text}" for text in questions]
        documents = [f"the old house {text}" for text in answers] if sides == "both" else answers
        expected = pairs_evaluator(Dataset.from_dict({"anchor": texts, "positive": documents}), "set")(model)
        assert evaluator(model) == pytest.approx(expected)
