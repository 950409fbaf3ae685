"""Retrieval metrics equal those computed by hand."""

import numpy as np
from conftest import SENTENCE
from datasets import Dataset

from neobert_hf.embeddings import pairs_evaluator, sentence_transformer


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
