"""Token weights and partial whitening equal NumPy's, and a saved model has them in stock modules."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from token_weights import FACTOR, inverse_document_frequencies, partial_whitening, weighted_sentence_transformer
from transformers import AutoTokenizer

from neobert_hf import NeoBERTModel
from neobert_hf.checkpoints.embedding_models import open_embedding_model

TEXTS = ["the quick brown fox", "jumps", "", "over lazy dog and then it sleeps in a warm red house by old sea", "fox"]
SOME = {"fox": 3.0, "the": 0.25, "jumps": 2.0}


@pytest.fixture(scope="module")
def token_weights(tokenizer):
    return {token: SOME.get(token, 1.5) for token in tokenizer.get_vocab()}


@pytest.fixture(scope="module")
def projection(folder):
    width = json.loads(Path(folder, "config.json").read_text())["hidden_size"]
    return np.random.default_rng(3).normal(size=(width, width), scale=width**-0.5).astype(np.float32)


@pytest.fixture(scope="module")
def expected(folder, token_weights):
    """The weighted mean of the token vectors of each text, computed alone in float64."""
    model, tokenizer = NeoBERTModel.from_pretrained(folder).double().eval(), AutoTokenizer.from_pretrained(folder)
    means = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs).last_hidden_state[0].numpy()
        tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
        means.append(np.average(states, axis=0, weights=[token_weights[token] for token in tokens]))
    return np.array(means)


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_embedding_is_the_weighted_mean_of_the_token_vectors(folder, token_weights, expected, side):
    model = weighted_sentence_transformer(folder, token_weights)
    model.tokenizer.padding_side = side
    np.testing.assert_allclose(model.encode(TEXTS, batch_size=5), expected, atol=2e-6)


# bf16 rounds each activation by 2^-9
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_saved_model_projects_the_weighted_mean(folder, token_weights, projection, expected, dtype, error, tmp_path):
    model = weighted_sentence_transformer(folder, token_weights, projection, dtype=dtype)
    model.save_pretrained(str(tmp_path))
    types = [module["type"] for module in json.loads((tmp_path / "modules.json").read_text())]
    assert len(types) == 4 and all(name.startswith("sentence_transformers.") for name in types)
    found = open_embedding_model(str(tmp_path), model_kwargs={"dtype": dtype}).encode(TEXTS)
    np.testing.assert_allclose(found, expected @ projection, atol=error * np.abs(expected @ projection).max())


def test_training_reaches_the_projection_and_the_encoder_and_leaves_the_weights(folder, token_weights, projection):
    model = weighted_sentence_transformer(folder, token_weights, projection)
    model(model.preprocess(TEXTS))["sentence_embedding"].pow(2).sum().backward()
    assert model[2].emb_layer.weight.grad is None
    expected = [FACTOR * token_weights[token] for token in model[2].vocab]
    assert model[2].emb_layer.weight[:, 0].tolist() == expected  # of a power of two, so without rounding
    assert model[1].linear.weight.grad.abs().min() > 0
    assert model[0].model.layer_norm.weight.grad.abs().sum() > 0


def test_inverse_document_frequencies_are_those_of_bm25(tokenizer):
    texts = ["the fox", "the quick fox fox", "jumps", "the dog"]
    weights = inverse_document_frequencies(tokenizer, texts, 64)
    assert set(weights) == set(tokenizer.get_vocab())
    for token, count in {"fox": 2, "the": 3, "jumps": 1, "sea": 0, "[CLS]": 4}.items():
        assert weights[token] == pytest.approx(math.log((4 + 1) / (count + 0.5)), rel=5e-4)  # four digits
    assert min(weights.values()) > 0
    assert inverse_document_frequencies(tokenizer, texts, 3)["fox"] > weights["fox"]  # [CLS] the [SEP]


@pytest.fixture(scope="module")
def vectors():
    """Embeddings whose directions have variances from 1 to 1e-4, around a mean that is not 0."""
    rng = np.random.default_rng(5)
    rotation = np.linalg.qr(rng.normal(size=(12, 12)))[0]
    return (rng.normal(size=(400, 12)) * np.geomspace(1, 0.01, 12)) @ rotation + 0.5


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_partial_whitening_takes_a_power_of_the_covariance(vectors, power):
    matrix = partial_whitening(vectors, power).astype(np.float64)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)  # a few roundings of float32
    assert np.linalg.det(matrix) == pytest.approx(1, rel=1e-4)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    before, after = (np.linalg.eigvalsh(np.cov(each.T)) for each in (unit, unit @ matrix))
    expected = np.sort(before ** (1 - power))
    np.testing.assert_allclose(after / after[-1], expected / expected[-1], rtol=1e-4)  # the matrix has float32


def test_partial_whitening_of_too_few_embeddings_is_refused(vectors):
    with pytest.raises(ValueError, match="12 embeddings do not vary in each of 12 directions; give more and other"):
        partial_whitening(vectors[:12])
