"""sentence-transformers models give the numbers of a plain forward, and their folders load without the package."""

import shutil

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from transformers import AutoTokenizer, configuration_utils

from neobert_hf import MINI_MODEL_PATH, NeoBERTModel
from neobert_hf.checkpoints import write_card
from neobert_hf.embeddings import (
    fingerprint,
    multi_vector_encoder,
    open_embedding_model,
    sentence_transformer,
    sparse_encoder,
)
from neobert_hf.export.graphs import load_graph

TEXTS = ["the quick brown fox", "jumps", "", "over lazy dog and then it sleeps in a warm red house by old sea", "fox"]


def tokens_of(folder, texts):
    model, tokenizer = NeoBERTModel.from_pretrained(folder).double().eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy() for text in texts]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_embedding_is_the_mean_or_the_first_of_the_hidden_states(folder, side, pooling):
    model = sentence_transformer(folder, pooling)
    model.tokenizer.padding_side = side
    states = tokens_of(folder, TEXTS)
    expected = [state.mean(0) if pooling == "mean" else state[0] for state in states]
    np.testing.assert_allclose(model.encode(TEXTS, batch_size=5), expected, atol=2e-6)


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_cached_loss_with_a_guide_gives_the_loss_and_the_gradients_of_the_plain_one(folder, pooling, unpad):
    """It passes the outputs of sentence-transformers to the model again."""
    from sentence_transformers.sentence_transformer.losses import CachedGISTEmbedLoss, GISTEmbedLoss

    results = []
    for loss_class, options in ((GISTEmbedLoss, {}), (CachedGISTEmbedLoss, {"mini_batch_size": 2})):
        model, guide = (sentence_transformer(folder, pooling) for _ in range(2))
        model[0].model.config.unpad_inputs = unpad
        others = [f"old {text} by the sea" for text in TEXTS]  # no pair is equal, so rounding decides nothing
        features = [model.preprocess(texts) for texts in (TEXTS, others)]
        loss = loss_class(model.double(), guide.double(), **options)(features, None)
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (wanted, wanted_gradients), (found, gradients) = results
    torch.testing.assert_close(found, wanted)
    assert gradients.keys() == wanted_gradients.keys() and len(gradients) > 10
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, msg=name)


def test_a_misspelt_feature_is_still_refused(folder):
    model = sentence_transformer(folder)
    with pytest.raises(TypeError, match="has no argument token_embedding; omit it"):
        model(model.preprocess(TEXTS) | {"token_embedding": torch.zeros(1)})


def test_sentence_transformer_loads_a_bare_folder(folder):
    expected = [state.mean(0) for state in tokens_of(folder, TEXTS)]
    np.testing.assert_allclose(SentenceTransformer(folder).encode(TEXTS), expected, atol=2e-6)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_mean_includes_the_prompt_unless_include_prompt_is_false(folder, side):
    prompts = {"query": "it sleeps by the sea "}
    length = len(AutoTokenizer.from_pretrained(folder)(prompts["query"])["input_ids"]) - 1  # [CLS] and the prompt
    states = tokens_of(folder, [prompts["query"] + text for text in TEXTS])
    for include, expected in {True: [s.mean(0) for s in states], False: [s[length:].mean(0) for s in states]}.items():
        model = sentence_transformer(folder, prompts=prompts, include_prompt=include)
        model.tokenizer.padding_side = side
        np.testing.assert_allclose(model.encode(TEXTS, prompt_name="query"), expected, atol=2e-6)


def test_a_sparse_encoder_gives_the_weights_of_splade(folder, model):
    """The maximum over the tokens of log(1 + relu(logit)) (arXiv 2109.10086, equation 6)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = sparse_encoder(folder)
    found = encoder.encode(TEXTS, convert_to_tensor=True).to_dense().numpy()
    for row, text in zip(found, TEXTS):
        with torch.no_grad():
            logits = model.double()(**tokenizer(text, return_tensors="pt")).logits[0].numpy()
        np.testing.assert_allclose(row, np.log1p(np.maximum(logits, 0)).max(0), atol=1e-5)


def test_a_multi_vector_encoder_shares_weights_and_scores_by_the_mean_maximum_cosine(folder, model):
    tokenizer, options = AutoTokenizer.from_pretrained(folder), dict(prompts={"query": "fox ", "document": ""})
    dense = sentence_transformer(folder, **options)
    encoder = multi_vector_encoder(dense)
    assert encoder[0] is dense[0]

    def tokens(text):
        with torch.no_grad():
            states = model.double().model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        return states / np.linalg.norm(states, axis=1, keepdims=True)

    expected = [[(tokens("fox quick house") @ tokens(text).T).max(1).mean() for text in TEXTS]]
    for each, question in ((encoder, "quick house"), (multi_vector_encoder(folder), "fox quick house")):
        found = each.similarity(each.encode_query([question]), each.encode_document(TEXTS))
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["SparseEncoder", "MultiVectorEncoder", "CrossEncoder"])
def test_a_model_that_gives_no_vector_for_a_text_is_refused_as_an_embedding_model(folder, tmp_path, kind):
    make = {"SparseEncoder": sparse_encoder, "MultiVectorEncoder": multi_vector_encoder, "CrossEncoder": CrossEncoder}
    make[kind](folder).save_pretrained(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=f"saved holds a {kind}, which gives no single vector for each text; open it"):
        open_embedding_model(str(tmp_path / "saved"))


def test_invalid_model_options_are_refused(folder, bert):
    with pytest.raises(ValueError, match="pooling='max'"):
        sentence_transformer(folder, pooling="max")
    with pytest.raises(ValueError, match="include_prompt=False"):
        sentence_transformer(folder, pooling="cls", include_prompt=False)
    with pytest.raises(ValueError, match="Prompt name 'nope' not found"):
        sentence_transformer(folder).encode("fox", prompt_name="nope")
    with pytest.raises(ValueError, match="has the model type bert, not neobert"):
        sentence_transformer(str(bert))


def test_the_fingerprint_covers_everything_that_decides_an_embedding(folder):
    def build(**options):
        return sentence_transformer(folder, **options)

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
    first = fingerprint(sentence_transformer(folder), {})
    shutil.copytree(folder, tmp_path / "moved")
    monkeypatch.setattr(configuration_utils, "__version__", "5.99.0")
    assert fingerprint(sentence_transformer(str(tmp_path / "moved")), {}) == first


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_packed_rows_of_flash_attention_give_the_same_embeddings(folder, monkeypatch, pooling):
    """Test sentence-transformers' own path without padding on a CPU; the test reports the kernels as available."""
    from transformers import modeling_flash_attention_utils

    model = sentence_transformer(folder, pooling)
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


def test_modules_of_a_saved_embedding_model_are_left_out_with_a_warning(caplog):
    """The mini model maps and weighs its tokens; a mean without both is another vector."""
    with caplog.at_level("WARNING"):
        sentence_transformer(MINI_MODEL_PATH)
    assert "with Dense, WordWeights, which sentence_transformer leaves out" in caplog.text


def assert_task(folder, task):
    """The export and the card say the same of a folder."""
    assert load_graph(folder).task == task
    write_card(folder)
    assert f"pipeline_tag: {task}" in (folder / "README.md").read_text()


def plain_dense(num_outputs):
    return Dense(32, num_outputs, activation_function=torch.nn.Identity())


NAMES = {"id2label": {0: "red", 1: "old", 2: "house"}}
WITHOUT_CLASSES = {  # settings of the encoder, and the modules after it that end with a Dense
    "as many as by default": ({}, [Dense(32, 2)]),
    "default names": ({"num_labels": 3}, [Normalize(), plain_dense(3)]),
    "names of an encoder": (NAMES, [plain_dense(3)]),
    "names, and a Normalize": (NAMES, [Normalize(), Dense(32, 3)]),
}


@pytest.mark.parametrize("name", WITHOUT_CLASSES)
def test_an_embedding_model_with_as_many_outputs_as_classes_has_no_classes(start, tmp_path, name):
    settings, modules = WITHOUT_CLASSES[name]
    model = sentence_transformer(str(start))
    for setting, value in settings.items():
        setattr(model[0].config, setting, value)
    model.extend(modules)
    model.save_pretrained(str(tmp_path))
    assert_task(tmp_path, "sentence-similarity")
