"""The contextual model: its embeddings against an oracle in NumPy, its invariances, its gradients, and its folder."""

import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path

import contextual_embeddings
import numpy as np
import pytest
import torch
from contextual_neobert import ContextualNeoBERTConfig, ContextualNeoBERTModel
from oracle import CONFIG, Oracle
from transformers import AutoModel

from neobert_hf import NeoBERTModel

SIZE, PROMPT = 5, 3  # context vectors, and vectors of the soft prompt
LENGTHS = (7, 1, 4)


@pytest.fixture(scope="module")
def encoder(checkpoint):
    return NeoBERTModel.from_pretrained(checkpoint).double()


@pytest.fixture
def contextual(encoder):
    """A contextual model in float64 whose two stages differ, with random weights of all parts."""
    torch.manual_seed(0)
    options = dict(context_size=SIZE, num_soft_prompt_tokens=PROMPT, context_dropout=0.5)
    model = ContextualNeoBERTModel.from_encoder(encoder, **options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("second_stage"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def batch():
    """Texts of 7, 1 and 4 tokens, padded on the right; a text of one token is the shortest."""
    ids = torch.randint(5, CONFIG["vocab_size"], (3, max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return ids * mask, mask


@pytest.fixture
def documents():
    return torch.randint(5, CONFIG["vocab_size"], (SIZE, 6), generator=torch.Generator().manual_seed(2))


def embed(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs).sentence_embedding


def stage_oracle(model, stage):
    weights = {f"model.{name}": value.numpy() for name, value in getattr(model, stage).state_dict().items()}
    return Oracle(weights)


def mlp(x, weights, name, activation):
    hidden = activation(x @ weights[f"{name}.0.weight"].T + weights[f"{name}.0.bias"])
    return hidden @ weights[f"{name}.2.weight"].T + weights[f"{name}.2.bias"]


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def expected_context(model, documents):
    """Context vectors, document by document in NumPy."""
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    first = stage_oracle(model, "first_stage")
    means = np.stack([first.encode(row)[2].mean(0) for row in documents.numpy()])
    x = mlp(means, weights, "first_projection", gelu)
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + CONFIG["norm_eps"]) * weights["context_norm.weight"]


def expected_embeddings(model, ids, mask, context):
    """Embeddings, text by text in NumPy: context at position 0, soft prompt at SIZE, SIZE + 1, ..., text behind it."""
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    second = stage_oracle(model, "second_stage")
    rows = []
    for row, keep in zip(ids.numpy(), mask.numpy().astype(bool)):
        text = second.weights["model.encoder.weight"][row[keep]]
        x = np.concatenate((context, weights["soft_prompt.weight"], text))
        positions = np.concatenate((np.zeros(SIZE), SIZE + np.arange(PROMPT + len(text))))
        pooled = second.encode_embeddings(x, positions)[2][SIZE + PROMPT :].mean(0)
        rows.append(pooled + mlp(pooled, weights, "second_projection", lambda x: np.maximum(x, 0)))
    return np.stack(rows)


def test_context_vectors_and_embeddings_are_those_of_the_oracle(contextual, batch, documents):
    context = expected_context(contextual, documents)
    np.testing.assert_allclose(embed(contextual, documents, embeds_context=True), context, atol=1e-10)
    found = embed(contextual, *batch, dataset_embeddings=torch.from_numpy(context))
    np.testing.assert_allclose(found, expected_embeddings(contextual, *batch, context), atol=1e-10)


def test_without_a_context_every_context_vector_is_the_null_vector(contextual, batch):
    null = contextual.null_context.weight.detach().numpy().repeat(SIZE, 0)
    np.testing.assert_allclose(embed(contextual, *batch), expected_embeddings(contextual, *batch, null), atol=1e-10)


@pytest.mark.parametrize("case", ["permuted context", "left padding", "padded computation", "alone", "no mask"])
def test_an_embedding_does_not_depend_on(case, contextual, batch, documents):
    """The order of the context, the side of the padding, the batch mates: 1e-10 in float64."""
    ids, mask = batch
    context = embed(contextual, documents, embeds_context=True)
    expected = embed(contextual, ids, mask, dataset_embeddings=context)
    inputs = {"input_ids": ids, "attention_mask": mask, "dataset_embeddings": context}
    if case == "permuted context":
        inputs["dataset_embeddings"] = context[torch.tensor([3, 0, 4, 1, 2])]
    elif case == "left padding":
        rolls = [(row.roll(max(LENGTHS) - n), keep.roll(max(LENGTHS) - n)) for row, keep, n in zip(ids, mask, LENGTHS)]
        inputs["input_ids"], inputs["attention_mask"] = map(torch.stack, zip(*rolls))
    elif case == "padded computation":
        contextual.config.unpad_inputs = False
    elif case == "alone":
        inputs["input_ids"], inputs["attention_mask"], expected = ids[2:, :4], mask[2:, :4], expected[2:]
    else:
        inputs["input_ids"], inputs["attention_mask"], expected = ids[:1], None, expected[:1]
    np.testing.assert_allclose(embed(contextual, **inputs), expected, atol=1e-10)


def test_dropout_of_all_context_vectors_gives_the_embedding_without_context(contextual, batch, documents):
    context = embed(contextual, documents, embeds_context=True)
    expected = embed(contextual, *batch)
    contextual.train().config.context_dropout = 1.0  # the config accepts less than 1 only
    np.testing.assert_allclose(embed(contextual, *batch, dataset_embeddings=context), expected, atol=1e-10)
    contextual.config.context_dropout = 0.0
    with_context = embed(contextual, *batch, dataset_embeddings=context)
    assert (with_context - expected).norm(dim=-1).min() > 1e-3


def test_dropout_replaces_the_stated_share_of_context_vectors_independently_for_each_text(contextual):
    contextual.train().config.context_dropout = 0.3
    context = torch.ones(SIZE, CONFIG["hidden_size"], dtype=torch.float64)
    dropped = (contextual._context_of_texts(2000, context)[..., 0] != 1).double()
    share, sigma = dropped.mean().item(), (0.3 * 0.7 / (2000 * SIZE)) ** 0.5
    assert abs(share - 0.3) < 4 * sigma
    assert len(dropped.unique(dim=0)) == 2**SIZE  # all combinations occur


def test_gradients_are_those_of_finite_differences_and_every_parameter_has_one(contextual, batch, documents):
    def scalar(context):
        return contextual(*batch, dataset_embeddings=context).sentence_embedding.square().sum()

    context = embed(contextual, documents, embeds_context=True).requires_grad_()
    assert torch.autograd.gradcheck(scalar, context, fast_mode=True)
    contextual.zero_grad()
    scalar(contextual.train()(documents, embeds_context=True).sentence_embedding).backward()
    assert not [name for name, parameter in contextual.named_parameters() if parameter.grad is None]


def test_both_stages_start_with_the_weights_of_the_encoder(encoder, batch):
    encoder.config._attn_implementation = "eager"
    model = ContextualNeoBERTModel.from_encoder(encoder)
    encoder.config._attn_implementation = "auto"
    assert model.second_stage.config._attn_implementation == "eager"
    for stage in (model.first_stage, model.second_stage):
        assert all(torch.equal(value, encoder.state_dict()[name]) for name, value in stage.state_dict().items())
    size = encoder.encoder.weight.square().mean().sqrt()
    assert torch.allclose(model.context_norm.weight, size)  # context vectors are as large as token embeddings
    assert (model.config.context_size, model.config.num_soft_prompt_tokens) == (512, 8)


def test_a_saved_model_keeps_its_context_and_loads_through_auto_model(contextual, batch, documents, tmp_path):
    contextual.set_context(embed(contextual, documents, embeds_context=True))
    contextual.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert type(loaded) is ContextualNeoBERTModel and loaded.config.has_context
    assert torch.equal(embed(loaded, *batch), embed(contextual, *batch))


def test_without_its_context_a_model_has_as_many_context_vectors_as_it_was_made_with(contextual, batch, tmp_path):
    before = embed(contextual, *batch)
    contextual.set_context(torch.randn(SIZE + 2, 32))
    contextual.save_pretrained(tmp_path)
    for model in (contextual, AutoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()):
        assert model.config.context_size == SIZE + 2
        model.set_context(None)
        assert model.config.context_size == SIZE and torch.equal(embed(model, *batch), before)


CLEAN = """
import sys; sys.modules["neobert_hf"] = None
import json
from sentence_transformers import SentenceTransformer
texts, folders = json.loads(sys.argv[1]), sys.argv[2:]
for folder in folders:
    model = SentenceTransformer(folder, trust_remote_code=True)
    assert type(model[0].model).__module__.startswith("transformers_modules."), type(model[0].model).__module__
    if folder == folders[1]:
        model.save(folders[2])
    batch = model.tokenizer(texts, padding=True, return_tensors="pt")
    inputs = batch["input_ids"], batch["attention_mask"]
    found = {"queries": model.encode_query(texts).tolist(), "documents": model.encode_document(texts).tolist()}
    found["context_vectors"] = model[0].model(*inputs, embeds_context=True).sentence_embedding.tolist()
    model[0].model.set_context(None)
    found["without_context"] = model[0].model(*inputs).sentence_embedding.tolist()
    print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.compat
def test_a_folder_of_version_0_1_0_a_new_one_and_its_copy_compute_the_same_vectors_by_their_own_code(tmp_path):
    """The first was saved when the library had the model; the last one is saved by the code of the second."""
    folders = [tmp_path / name for name in ("old", "new", "copy")]
    zipfile.ZipFile(Path(__file__).with_name("contextual_model_0_1_0.zip")).extractall(folders[0])
    expected = json.loads((folders[0] / "expected.json").read_text())
    texts = expected.pop("texts")
    ours = contextual_embeddings.contextual_sentence_transformer(str(folders[0]))
    assert type(ours[0].model) is ContextualNeoBERTModel
    np.testing.assert_allclose(ours.encode_query(texts), expected["queries"], atol=1e-5)  # float32
    ours.save(str(folders[1]))
    assert json.loads((folders[1] / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "contextual_neobert.ContextualNeoBERTConfig",
        "AutoModel": "contextual_neobert.ContextualNeoBERTModel",
    }
    code = (folders[1] / "contextual_neobert.py").read_text()
    names = {file.stem for file in folders[1].glob("*_neobert.py")} - {"contextual_neobert"}
    assert names and all(f"from .{name} import" in code for name in names)  # as transformers 4.57 needs it

    command = [sys.executable, "-I", "-c", CLEAN, json.dumps(texts), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]  # other packages may print too
    for folder, line in zip(folders, lines, strict=True):
        found = json.loads(line)
        for name, vectors in expected.items():
            np.testing.assert_allclose(found[name], vectors, atol=1e-5, err_msg=f"{folder.name} {name}")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"context_size": 0}, "context_size=0 is not positive"),
        ({"context_dropout": 1}, "context_dropout=1 is no probability"),
        ({"hidden_size": 770}, "hidden_size=770 is not divisible"),
    ],
)
def test_the_config_refuses_invalid_values(values, message):
    with pytest.raises(ValueError, match=message):
        ContextualNeoBERTConfig(**values)


@pytest.mark.parametrize("value, dtype", [(torch.nan, torch.float64), (torch.inf, torch.float64), (1e6, torch.float16)])
def test_a_refused_context_changes_nothing(contextual, batch, documents, value, dtype):
    """A number may be infinite only in the dtype of the model."""
    contextual.to(dtype)
    for vectors in (None, embed(contextual, documents, embeds_context=True)):
        contextual.set_context(vectors)
        config, before = contextual.config.to_dict(), embed(contextual, *batch)
        for refused in (torch.full((SIZE + 1, 32), value), torch.zeros(SIZE, 31), torch.zeros(0, 32)):
            with pytest.raises(ValueError, match=r"infinite values or NaN|have shape"):
                contextual.set_context(refused)
        assert torch.equal(embed(contextual, *batch), before) and contextual.config.to_dict() == config


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda ids, mask: {"dataset_embeddings": torch.zeros(SIZE + 1, 32)}, ValueError, "but this model reads"),
        (lambda ids, mask: {"cu_seq_lens_q": ids[0]}, TypeError, "no argument cu_seq_lens_q; give padded"),
        (lambda ids, mask: {"labels": ids}, TypeError, "no argument labels"),
    ],
)
def test_an_invalid_input_is_refused(change, error, message, contextual, batch):
    ids, mask = batch
    with pytest.raises(error, match=message):
        contextual(**{"input_ids": ids, "attention_mask": mask} | change(ids, mask))
    assert contextual(*batch, output_hidden_states=False).sentence_embedding is not None
