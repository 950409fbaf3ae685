"""sentence-transformers models give the numbers of a plain forward, and their folders load without the package."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers", reason="embeddings need sentence-transformers (pip install -e .[embed])")

from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, WordEmbeddings
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from transformers import AutoTokenizer, BertConfig, BertModel, configuration_utils

from neobert_hf import (
    MINI_MODEL_PATH,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
    multi_vector_encoder,
    sentence_transformer,
    sparse_encoder,
)
from neobert_hf.data.texts import check_texts
from neobert_hf.embeddings.models import (
    fingerprint,
    inverse_document_frequencies,
    open_embedding_model,
    partial_whitening,
)

TEXTS = ["the quick brown fox", "jumps", "", "over lazy dog and then it sleeps in a warm red house by old sea", "fox"]


@pytest.fixture(scope="module")
def folder(checkpoint, tokenizer, tmp_path_factory):
    """A bare NeoBERT in the published layout, with its tokenizer."""
    from neobert_hf import NeoBERTForMaskedLM

    folder = tmp_path_factory.mktemp("bare")
    NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokens_of(folder, texts):
    """Return the last hidden states of each text, computed alone in float64."""
    model, tokenizer = NeoBERTModel.from_pretrained(folder).double().eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy() for text in texts]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_embedding_is_the_mean_or_the_first_of_the_hidden_states(folder, side, pooling):
    model = sentence_transformer(str(folder), pooling)
    model.tokenizer.padding_side = side
    states = tokens_of(folder, TEXTS)
    expected = [state.mean(0) if pooling == "mean" else state[0] for state in states]
    np.testing.assert_allclose(model.encode(TEXTS, batch_size=5), expected, atol=2e-6)


def test_sentence_transformer_loads_a_bare_folder(folder):
    expected = [state.mean(0) for state in tokens_of(folder, TEXTS)]
    np.testing.assert_allclose(SentenceTransformer(str(folder)).encode(TEXTS), expected, atol=2e-6)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_mean_includes_the_prompt_unless_include_prompt_is_false(folder, side):
    prompts = {"query": "it sleeps by the sea "}
    length = len(AutoTokenizer.from_pretrained(folder)(prompts["query"])["input_ids"]) - 1  # [CLS] and the prompt
    states = tokens_of(folder, [prompts["query"] + text for text in TEXTS])
    for include, expected in {True: [s.mean(0) for s in states], False: [s[length:].mean(0) for s in states]}.items():
        model = sentence_transformer(str(folder), prompts=prompts, include_prompt=include)
        model.tokenizer.padding_side = side
        np.testing.assert_allclose(model.encode(TEXTS, prompt_name="query"), expected, atol=2e-6)


WEIGHTS = {"fox": 3.0, "the": 0.25, "jumps": 2.0}


def all_weights(folder):
    return {token: WEIGHTS.get(token, 1.5) for token in AutoTokenizer.from_pretrained(folder).get_vocab()}


@pytest.mark.parametrize("side", ["right", "left"])
def test_with_token_weights_an_embedding_is_their_weighted_mean(folder, side, tmp_path):
    model = sentence_transformer(str(folder), token_weights=all_weights(folder))
    model.tokenizer.padding_side = side
    tokenizer, expected = AutoTokenizer.from_pretrained(folder), []
    for text, state in zip(TEXTS, tokens_of(folder, TEXTS)):
        weights = [WEIGHTS.get(token, 1.5) for token in tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])]
        expected.append(np.average(state, axis=0, weights=weights))
    np.testing.assert_allclose(model.encode(TEXTS, batch_size=5), expected, atol=2e-6)
    model.save_pretrained(str(tmp_path))
    types = [module["type"] for module in json.loads((tmp_path / "modules.json").read_text())]
    assert len(types) == 3 and all(name.startswith("sentence_transformers.") for name in types)
    again = SentenceTransformer(str(tmp_path))
    np.testing.assert_array_equal(again.encode(TEXTS), model.encode(TEXTS))
    assert fingerprint(model, {}) != fingerprint(sentence_transformer(str(folder)), {})


def test_training_reaches_the_token_weights_and_the_encoder(folder):
    model = sentence_transformer(str(folder), token_weights=all_weights(folder))
    model(model.preprocess(TEXTS))["sentence_embedding"].pow(2).sum().backward()
    changed = model[1].emb_layer.weight.grad[:, 0] != 0
    used = {i for text in TEXTS for i in model.tokenizer(text)["input_ids"]}
    assert set(changed.nonzero()[:, 0].tolist()) <= used and changed.sum() > 5
    assert model[0].model.layer_norm.weight.grad.abs().sum() > 0


def random_projection(folder):
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    return np.random.default_rng(3).normal(size=(width, width), scale=width**-0.5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_with_a_projection_an_embedding_is_its_product_with_the_matrix(folder, pooling, tmp_path):
    matrix = random_projection(folder)
    model = sentence_transformer(str(folder), pooling=pooling, projection=matrix)
    pooled = sentence_transformer(str(folder), pooling=pooling).encode(TEXTS)
    np.testing.assert_allclose(model.encode(TEXTS, batch_size=5), pooled @ matrix, atol=1e-5)
    model.save_pretrained(str(tmp_path))
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path)).encode(TEXTS), model.encode(TEXTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projection_and_token_weights_work_together_in_each_dtype(folder, dtype, tmp_path):
    """The mean by token weights is float32 in sentence-transformers, whatever the dtype of the model."""
    matrix, weights = random_projection(folder), all_weights(folder)
    sentence_transformer(str(folder), token_weights=weights, projection=matrix).save_pretrained(str(tmp_path))
    model = SentenceTransformer(str(tmp_path), model_kwargs={"dtype": dtype})
    expected = sentence_transformer(str(folder), token_weights=weights).encode(TEXTS) @ matrix
    found = model.encode(TEXTS)
    error = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]  # bf16 rounds each activation by 2^-9
    np.testing.assert_allclose(found, expected, atol=error * np.abs(expected).max())
    np.testing.assert_allclose(model.encode(TEXTS[:1])[0], found[0], atol=error * np.abs(expected).max())


def test_training_reaches_the_projection_and_the_encoder(folder):
    model = sentence_transformer(str(folder), projection=random_projection(folder))
    model(model.preprocess(TEXTS))["sentence_embedding"].pow(2).sum().backward()
    assert model[1].linear.weight.grad.abs().min() > 0
    assert model[0].model.layer_norm.weight.grad.abs().sum() > 0


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


def test_partial_whitening_does_not_depend_on_the_lengths_of_embeddings(vectors):
    scaled = vectors * np.random.default_rng(6).uniform(0.1, 10, (len(vectors), 1))
    np.testing.assert_allclose(partial_whitening(scaled), partial_whitening(vectors), atol=1e-5)


@pytest.mark.parametrize("number", [0, 1, 12])
def test_partial_whitening_of_too_few_embeddings_is_refused(vectors, number):
    with pytest.raises(ValueError, match=f"{number} embeddings do not vary in each of 12 directions; give more and"):
        partial_whitening(vectors[:number])
    with pytest.raises(ValueError, match="400 embeddings do not vary"):
        partial_whitening(np.tile(vectors[:10], (40, 1)))


@pytest.mark.parametrize("value", [0, math.nan, math.inf])
def test_partial_whitening_of_an_embedding_without_direction_is_refused(vectors, value):
    changed = vectors.copy()
    changed[7] = value
    with pytest.raises(ValueError, match="1 of 400 embeddings are 0 or not finite"):
        partial_whitening(changed)


def test_inverse_document_frequencies_are_those_of_bm25(tokenizer):
    texts = ["the fox", "the quick fox fox", "jumps", "the dog"]
    weights = inverse_document_frequencies(tokenizer, iter(texts))
    assert set(weights) == set(tokenizer.get_vocab())
    for token, count in {"fox": 2, "the": 3, "jumps": 1, "sea": 0, "[CLS]": 4}.items():
        assert weights[token] == pytest.approx(math.log((4 + 1) / (count + 0.5)), rel=5e-4)  # four digits
    assert min(weights.values()) > 0
    assert inverse_document_frequencies(tokenizer, texts, max_length=3)["fox"] > weights["fox"]  # [CLS] the [SEP]
    with pytest.raises(ValueError, match="no texts to count tokens in"):
        inverse_document_frequencies(tokenizer, [])


def test_removing_padding_does_not_change_embeddings(folder):
    texts = [" ".join(TEXTS[3].split()[:n]) for n in (1, 13, 4, 7, 2)]
    padded = sentence_transformer(str(folder))
    padded[0].model.config.unpad_inputs = False
    np.testing.assert_allclose(sentence_transformer(str(folder)).encode(texts), padded.encode(texts), atol=1e-5)


CLEAN = """
import sys; sys.modules["neobert_hf"] = None
import numpy as np
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], trust_remote_code=True)
assert model.prompts["query"] == "search: " and type(model[0].model).__module__.startswith("transformers_modules")
np.save(sys.argv[2], model.encode(["the quick brown fox", "jumps"], prompt_name="query"))
"""


def test_a_saved_folder_gives_the_same_embeddings_without_the_package(folder, tmp_path):
    model = sentence_transformer(str(folder), prompts={"query": "search: "}, normalize=True)
    model.save_pretrained(str(tmp_path / "saved"))
    types = [module["type"] for module in json.loads((tmp_path / "saved/modules.json").read_text())]
    assert len(types) == 3 and all(name.startswith("sentence_transformers.") for name in types)
    expected = model.encode(["the quick brown fox", "jumps"], prompt_name="query")
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)
    again = SentenceTransformer(str(tmp_path / "saved"))
    np.testing.assert_array_equal(again.encode(["the quick brown fox", "jumps"], prompt_name="query"), expected)
    command = [sys.executable, "-I", "-c", CLEAN, str(tmp_path / "saved"), str(tmp_path / "out.npy")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_several_processes_give_the_same_embeddings(folder):
    model = sentence_transformer(str(folder))
    np.testing.assert_allclose(model.encode(TEXTS * 4, device=["cpu", "cpu"]), model.encode(TEXTS * 4), atol=2e-6)


def test_a_cross_encoder_scores_pairs_with_the_classification_head(folder, tmp_path):
    torch.manual_seed(0)
    classifier = NeoBERTForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    classifier.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    pairs = [("the quick fox", "jumps over"), ("a house", "sleeps in a warm red house by sea")]
    with torch.no_grad():
        expected = [torch.sigmoid(classifier(**tokenizer(*pair, return_tensors="pt")).logits)[0, 0] for pair in pairs]
    np.testing.assert_allclose(CrossEncoder(str(tmp_path)).predict(pairs), expected, atol=2e-6)


def test_a_sparse_encoder_gives_the_weights_of_splade(folder, model):
    """The maximum over the tokens of log(1 + relu(logit)) (arXiv 2109.10086, equation 6)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = sparse_encoder(str(folder))
    found = encoder.encode(TEXTS, convert_to_tensor=True).to_dense().numpy()
    for row, text in zip(found, TEXTS):
        with torch.no_grad():
            logits = model.double()(**tokenizer(text, return_tensors="pt")).logits[0].numpy()
        np.testing.assert_allclose(row, np.log1p(np.maximum(logits, 0)).max(0), atol=1e-5)


def test_late_interaction_sums_the_maximum_cosine_of_each_query_token(folder):
    """MaxSim (ColBERT, arXiv 2004.12832, equation 3) over the token vectors of the encoder."""
    torch.manual_seed(0)
    encoder = MultiVectorEncoder(str(folder))
    (question,), documents = encoder.encode_query(["quick fox"]), encoder.encode_document(TEXTS[:2])
    expected = [(question.numpy() @ document.numpy().T).max(1).sum() for document in documents]
    np.testing.assert_allclose(encoder.similarity([question], documents)[0].numpy(), expected, atol=1e-5)


def test_a_multi_vector_encoder_shares_weights_and_scores_by_the_mean_maximum_cosine(folder, model):
    tokenizer, options = AutoTokenizer.from_pretrained(folder), dict(prompts={"query": "fox ", "document": ""})
    dense = sentence_transformer(str(folder), **options)
    encoder = multi_vector_encoder(dense)
    assert encoder[0] is dense[0]

    def tokens(text):
        with torch.no_grad():
            states = model.double().model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        return states / np.linalg.norm(states, axis=1, keepdims=True)

    expected = [[(tokens("fox quick house") @ tokens(text).T).max(1).mean() for text in TEXTS]]
    for each, question in ((encoder, "quick house"), (multi_vector_encoder(str(folder)), "fox quick house")):
        found = each.similarity(each.encode_query([question]), each.encode_document(TEXTS))
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["SparseEncoder", "MultiVectorEncoder", "CrossEncoder"])
def test_a_model_that_gives_no_vector_for_a_text_is_refused_as_an_embedding_model(folder, tmp_path, kind):
    make = {"SparseEncoder": sparse_encoder, "MultiVectorEncoder": multi_vector_encoder, "CrossEncoder": CrossEncoder}
    make[kind](str(folder)).save_pretrained(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=f"saved holds a {kind}, which gives no single vector for each text; open it"):
        open_embedding_model(str(tmp_path / "saved"))


def test_empty_texts_are_embedded_as_special_tokens_and_long_texts_are_truncated(folder):
    model = sentence_transformer(str(folder), max_seq_length=16)
    empty, blank, long = model.encode(["", "   ", "fox " * 25_000])
    np.testing.assert_array_equal(empty, blank)
    np.testing.assert_allclose(long, model.encode("fox " * 14), atol=1e-6)
    assert np.isfinite(empty).all()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["fine", None], "text 1 is None"),
        ([3], "text 0 is 3, a int"),
        (["fine", "also", "half \ud800 a pair"], "text 2 has the lone surrogate '\\\\ud800' at character 5"),
    ],
)
def test_the_error_names_the_text_that_cannot_be_embedded(folder, texts, message):
    with pytest.raises(ValueError, match=message):
        check_texts(texts)
    with pytest.raises((ValueError, TypeError)):  # raised by sentence-transformers, without the number of the text
        sentence_transformer(str(folder)).encode(texts)


def test_invalid_model_options_are_refused(folder, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="pooling='max'"):
        sentence_transformer(str(folder), pooling="max")
    with pytest.raises(ValueError, match="include_prompt=False"):
        sentence_transformer(str(folder), pooling="cls", include_prompt=False)
    with pytest.raises(ValueError, match="pooling='cls' has no mean; remove one of the two"):
        sentence_transformer(str(folder), pooling="cls", token_weights=all_weights(folder))
    with pytest.raises(ValueError, match=r"\d+ tokens have no weight, such as '.*'; give every token a weight"):
        sentence_transformer(str(folder), token_weights=WEIGHTS)
    with pytest.raises(ValueError, match=r"the projection has the shape \(3, 4\), but must have"):
        sentence_transformer(str(folder), projection=np.zeros((3, 4)))
    with pytest.raises(ValueError, match="Prompt name 'nope' not found"):
        sentence_transformer(str(folder)).encode("fox", prompt_name="nope")
    shape = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has the model type bert, not neobert"):
        sentence_transformer(str(tmp_path))


def test_the_fingerprint_covers_everything_that_decides_an_embedding(folder):
    def build(**options):
        return sentence_transformer(str(folder), **options)

    known = {fingerprint(build(), {})}
    assert known == {fingerprint(build(), {})}
    others = [build(pooling="cls"), build(normalize=True), build(max_seq_length=9)]
    others += [build(include_prompt=False), build(model_kwargs={"dtype": torch.bfloat16})]
    changed = build()
    changed[0].model.layer_norm.weight.data[0] += 1e-3
    others += [changed, build(prompts={"query": "a"}), build(), build(), build()]
    others[-1].truncate_dim = 8
    others[-2][0].config.rope_parameters["rope_theta"] = 500.0
    others[-3].tokenizer.backend_tokenizer.normalizer = None
    known |= {fingerprint(each, {}) for each in others} | {fingerprint(build(), {"query": "a"})}
    assert len(known) == 12


def test_the_fingerprint_does_not_depend_on_the_folder_or_the_version_of_transformers(folder, tmp_path, monkeypatch):
    first = fingerprint(sentence_transformer(str(folder)), {})
    shutil.copytree(folder, tmp_path / "moved")
    monkeypatch.setattr(configuration_utils, "__version__", "5.99.0")
    assert fingerprint(sentence_transformer(str(tmp_path / "moved")), {}) == first


def test_the_fingerprint_covers_a_tokenizer_of_words():
    def build(*words):
        return SentenceTransformer(modules=[WordEmbeddings(WhitespaceTokenizer(words), np.ones((2, 4))), Pooling(4)])

    assert fingerprint(build("fox", "dog"), {}) == fingerprint(build("fox", "dog"), {})
    assert fingerprint(build("fox", "dog"), {}) != fingerprint(build("fox", "cat"), {})


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_packed_rows_of_flash_attention_give_the_same_embeddings(folder, monkeypatch, pooling):
    """Test sentence-transformers' own path without padding on a CPU; the test reports the kernels as available."""
    from transformers import modeling_flash_attention_utils

    model = sentence_transformer(str(folder), pooling)
    expected, seen = model.encode(TEXTS), []
    kernels = (None, lambda: None, None, None), None
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *a, **k: kernels)
    monkeypatch.setattr(type(model[0]), "_is_flash_attention_requested", lambda self: True)
    model[0].unpad_inputs = True
    forward = model[0].model.forward
    model[0].model.forward = lambda **inputs: seen.append(inputs) or forward(**inputs)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=2e-6)
    assert seen[0]["input_ids"].shape[0] == 1 and seen[0]["cu_seq_lens_q"].shape == (len(TEXTS) + 1,)
    assert "attention_mask" not in seen[0]


def test_with_token_weights_flash_attention_gets_padded_rows(folder, monkeypatch, tmp_path):
    """The weights need the attention mask, which packed rows do not have; the model removes the padding itself."""
    from transformers import modeling_flash_attention_utils

    sentence_transformer(str(folder), token_weights=all_weights(folder)).save_pretrained(str(tmp_path))
    kernels = (None, lambda: None, None, None), None
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *a, **k: kernels)
    monkeypatch.setattr(Transformer, "_is_flash_attention_requested", lambda self: True)
    model = SentenceTransformer(str(tmp_path))
    assert model.preprocess(TEXTS)["attention_mask"].shape[0] == len(TEXTS)
    assert model.encode(TEXTS).shape == (len(TEXTS), model.get_embedding_dimension())


def test_modules_of_a_saved_embedding_model_are_left_out_with_a_warning(caplog):
    """The mini model weighs its tokens after a linear map; a mean without both has other vectors."""
    with caplog.at_level("WARNING"):
        sentence_transformer(MINI_MODEL_PATH)
    assert "with Dense, WordWeights, which sentence_transformer leaves out" in caplog.text
