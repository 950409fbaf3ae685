"""The contextual model: its embeddings against an oracle in NumPy, its invariances, its gradients, and its folder."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from oracle import CONFIG, Oracle
from transformers import AutoConfig, AutoModel

from neobert_hf import ContextualNeoBERTConfig, ContextualNeoBERTModel, NeoBERTModel

SIZE, PROMPT = 5, 3  # context vectors, and vectors of the soft prompt
LENGTHS = (7, 1, 4)


@pytest.fixture(scope="module")
def encoder(checkpoint):
    return NeoBERTModel.from_pretrained(checkpoint).double()


@pytest.fixture
def contextual(encoder):
    """A contextual model in float64 whose two stages differ, with random weights of all parts."""
    torch.manual_seed(0)
    model = ContextualNeoBERTModel.from_encoder(
        encoder, context_size=SIZE, num_soft_prompt_tokens=PROMPT, context_dropout=0.5
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("second_stage"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def batch():
    """Texts of 7, 1 and 4 tokens, padded on the right; a text of one token is the shortest."""
    ids = torch.randint(
        5, CONFIG["vocab_size"], (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1)
    )
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return ids * mask, mask


@pytest.fixture
def documents():
    return torch.randint(5, CONFIG["vocab_size"], (SIZE, 6), generator=torch.Generator().manual_seed(2))


def embed(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs).sentence_embedding


def stage_oracle(model, stage):
    """The oracle of a NeoBERT with the weights of a stage."""
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


def expected_embeddings(model, ids, mask, context, stride=1):
    """Embeddings, text by text in NumPy: context at position 0, soft prompt at SIZE, SIZE + 1, ..., text behind it."""
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    second = stage_oracle(model, "second_stage")
    rows = []
    for row, keep in zip(ids.numpy(), mask.numpy().astype(bool)):
        text = second.weights["model.encoder.weight"][row[keep]]
        x = np.concatenate((context, weights["soft_prompt.weight"], text))
        positions = np.concatenate(
            (np.zeros(SIZE), SIZE + np.arange(PROMPT), SIZE + PROMPT + stride * np.arange(len(text)))
        )
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


@pytest.mark.parametrize(
    "case", ["permuted context", "left padding", "packed texts", "padded computation", "alone", "no mask"]
)
def test_an_embedding_does_not_depend_on(case, contextual, batch, documents):
    """The order of the context, the side of the padding, the format of the batch, the batch mates: 1e-10 in float64."""
    ids, mask = batch
    context = embed(contextual, documents, embeds_context=True)
    expected = embed(contextual, ids, mask, dataset_embeddings=context)
    inputs = {"input_ids": ids, "attention_mask": mask, "dataset_embeddings": context}
    if case == "permuted context":
        inputs["dataset_embeddings"] = context[torch.tensor([3, 0, 4, 1, 2])]
    elif case == "left padding":
        rolls = [(row.roll(max(LENGTHS) - n), keep.roll(max(LENGTHS) - n)) for row, keep, n in zip(ids, mask, LENGTHS)]
        inputs["input_ids"], inputs["attention_mask"] = map(torch.stack, zip(*rolls))
    elif case == "packed texts":  # as sentence-transformers gives them with FlashAttention
        ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        inputs = {"input_ids": ids[mask.bool()][None], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7}
        numbers = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None]
        inputs |= {"dataset_embeddings": context, "seq_idx": numbers, "max_length_k": 7}
    elif case == "padded computation":
        contextual.config.unpad_inputs = False
    elif case == "alone":
        inputs["input_ids"], inputs["attention_mask"], expected = ids[2:, :4], mask[2:, :4], expected[2:]
    else:
        inputs["input_ids"], inputs["attention_mask"], expected = ids[:1], None, expected[:1]
    np.testing.assert_allclose(embed(contextual, **inputs), expected, atol=1e-10)


@pytest.mark.parametrize("mark", ["cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "position_ids"])
@pytest.mark.parametrize("embeds_context", [False, True])
def test_every_input_that_marks_documents_marks_texts(contextual, batch, mark, embeds_context):
    ids, mask = batch
    marks = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"), torch.tensor([0, *LENGTHS]).cumsum(0))
    marks["seq_idx"] = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
    marks["position_ids"] = torch.cat([torch.arange(2, 2 + n) for n in LENGTHS])  # the first may be any number
    found = embed(contextual, ids[mask.bool()][None], embeds_context=embeds_context, **{mark: marks[mark]})
    torch.testing.assert_close(found, embed(contextual, ids, mask, embeds_context=embeds_context), rtol=0, atol=1e-10)


def test_texts_may_be_packed_into_several_rows(contextual, batch):
    ids = torch.cat((batch[0][0], batch[0][0]))[:12].view(2, 6)
    found = embed(contextual, ids, position_ids=torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]))
    alone = [embed(contextual, text[None]) for text in (ids[0, :2], ids[0, 2:], ids[1])]
    torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-10)
    mask = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    found = embed(contextual, ids, mask, position_ids=torch.tensor([[0, 9, 0, 1, 5, 5], [7, 0, 1, 2, 0, 1]]))
    alone = [embed(contextual, text[None]) for text in (ids[0, :1], ids[0, 2:4], ids[1, 1:4], ids[1, 4:])]
    torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-10)


def test_the_positions_of_the_texts_are_read(contextual, batch, documents):
    context = embed(contextual, documents, embeds_context=True)
    positions = 2 * torch.arange(max(LENGTHS))
    found = embed(contextual, *batch, dataset_embeddings=context, position_ids=positions)
    expected = expected_embeddings(contextual, *batch, context.numpy(), stride=2)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_allclose(  # left padding: the positions are those of the tokens, not of the columns
        embed(contextual, ids := batch[0][:1, :4].flip(0), position_ids=positions[:4], embeds_context=True),
        embed(
            contextual,
            torch.nn.functional.pad(ids, (3, 0)),
            torch.tensor([[0, 0, 0, 1, 1, 1, 1]]),
            position_ids=torch.nn.functional.pad(positions[:4], (3, 0)),
            embeds_context=True,
        ),
        atol=1e-10,
    )


def test_each_context_vector_changes_every_embedding(contextual, batch, documents):
    context = embed(contextual, documents, embeds_context=True)
    expected = embed(contextual, *batch, dataset_embeddings=context)
    for row in range(SIZE):
        changed = context.clone()
        changed[row] = changed[row].flip(0)
        distance = (embed(contextual, *batch, dataset_embeddings=changed) - expected).norm(dim=-1)
        assert (distance > 1e-4).all()


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


def test_every_parameter_has_a_gradient(contextual, batch, documents):
    contextual.train()
    context = contextual(documents, embeds_context=True).sentence_embedding
    contextual(*batch, dataset_embeddings=context).sentence_embedding.square().sum().backward()
    missing = [name for name, parameter in contextual.named_parameters() if parameter.grad is None]
    assert not missing


def test_gradients_are_those_of_finite_differences(contextual, batch, documents):
    def scalar(context):
        return contextual(*batch, dataset_embeddings=context).sentence_embedding.square().sum()

    context = embed(contextual, documents, embeds_context=True).requires_grad_()
    assert torch.autograd.gradcheck(scalar, context, fast_mode=True)


@pytest.mark.compat
def test_a_saved_model_keeps_its_context_and_loads_through_auto_model(contextual, batch, documents, tmp_path):
    contextual.set_context(embed(contextual, documents, embeds_context=True))
    contextual.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "contextual_neobert.ContextualNeoBERTConfig",
        "AutoModel": "contextual_neobert.ContextualNeoBERTModel",
    }
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert type(loaded) is ContextualNeoBERTModel and loaded.config.has_context
    assert torch.equal(embed(loaded, *batch), embed(contextual, *batch))


@pytest.mark.compat
def test_a_saved_model_loads_without_the_package(contextual, batch, tmp_path):
    contextual.save_pretrained(tmp_path)
    script = (
        "import sys, torch; sys.modules['neobert_hf'] = None\n"
        "from transformers import AutoModel\n"
        f"model = AutoModel.from_pretrained({str(tmp_path)!r}, trust_remote_code=True, dtype=torch.float64).eval()\n"
        "assert type(model).__module__.startswith('transformers_modules.'), type(model).__module__\n"
        f"print(model(torch.tensor({batch[0].tolist()}), torch.tensor({batch[1].tolist()})).sentence_embedding.norm().item())"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(embed(contextual, *batch).norm().item(), abs=1e-10)


@pytest.mark.compat
def test_both_stages_start_with_the_weights_of_the_encoder(encoder):
    model = ContextualNeoBERTModel.from_encoder(encoder)
    for stage in (model.first_stage, model.second_stage):
        assert all(torch.equal(value, encoder.state_dict()[name]) for name, value in stage.state_dict().items())
    size = encoder.encoder.weight.square().mean().sqrt()
    assert torch.allclose(model.context_norm.weight, size)  # context vectors are as large as token embeddings
    assert (model.config.context_size, model.config.num_soft_prompt_tokens) == (512, 8)
    assert model.config.hidden_size == encoder.config.hidden_size


def test_a_new_model_starts_with_context_vectors_as_large_as_token_embeddings():
    shape = dict(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    model = ContextualNeoBERTModel(ContextualNeoBERTConfig(**shape, embedding_init_range=0.5, decoder_init_range=0.2))
    vectors = embed(model, torch.randint(1, 96, (50, 9)), embeds_context=True)
    expected = model.second_stage.encoder.weight[1:].square().mean().sqrt().item()
    assert vectors.square().mean().sqrt().item() == pytest.approx(expected, rel=0.2)


def test_a_model_of_an_encoder_keeps_its_mode_and_its_attention(encoder, batch):
    encoder.config._attn_implementation = "eager"
    model = ContextualNeoBERTModel.from_encoder(encoder.eval(), context_size=SIZE)
    encoder.config._attn_implementation = "auto"
    assert not model.training and model.second_stage.config._attn_implementation == "eager"
    expected = embed(model, *batch)
    model.config.return_dict = False
    with torch.no_grad():
        np.testing.assert_allclose(model(*batch, return_dict=True).sentence_embedding, expected, atol=1e-12)


def test_both_stages_have_the_same_number_of_tokens_after_a_resize(contextual, batch, tmp_path):
    expected = embed(contextual, *batch)
    contextual.resize_token_embeddings(100, mean_resizing=False)
    assert contextual.config.vocab_size == 100
    assert len(contextual.first_stage.encoder.weight) == len(contextual.second_stage.encoder.weight) == 100
    np.testing.assert_allclose(embed(contextual, *batch), expected, atol=1e-12)
    contextual.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    np.testing.assert_allclose(embed(loaded, *batch), expected, atol=1e-12)


def test_overrides_of_inherited_values_are_checked(contextual, tmp_path):
    contextual.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert config.rope_parameters["factor"] == 2.0 and config.context_size == SIZE
    with pytest.raises(ValueError, match="rope_type='nothing' is not one of"):
        AutoConfig.from_pretrained(tmp_path, rope_parameters={"rope_type": "nothing"})


def test_a_compiled_model_gives_the_same_embeddings(contextual, batch, documents):
    context = embed(contextual, documents, embeds_context=True)
    compiled = torch.compile(contextual, backend="aot_eager", fullgraph=True)
    found = embed(compiled, *batch, dataset_embeddings=context)
    np.testing.assert_allclose(found, embed(contextual, *batch, dataset_embeddings=context), atol=1e-10)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"context_size": 0}, "context_size=0 must be a positive integer"),
        ({"context_size": 2.0}, "context_size=2.0 must be a positive integer"),
        ({"has_context": "no"}, "has_context='no' must be true or false"),
        ({"context_dropout": None}, "context_dropout=None must be a number"),
        ({"trained_context_size": "4"}, "trained_context_size='4' must be a positive integer"),
        ({"num_soft_prompt_tokens": -1}, "num_soft_prompt_tokens=-1 must be an integer of at least 0"),
        ({"context_dropout": 1}, "context_dropout=1 must be a number of at least 0 and below 1"),
        ({"hidden_size": 770}, "hidden_size=770 is not divisible"),
    ],
)
def test_the_config_refuses_invalid_values(values, message):
    with pytest.raises(ValueError, match=message):
        ContextualNeoBERTConfig(**values)


@pytest.mark.parametrize(
    "shape, message",
    [
        ((SIZE, 31), "context vectors have shape .5, 31.; it must be .documents, 32."),
        ((0, 32), "context vectors have shape .0, 32."),
        ((SIZE,), "context vectors have shape .5,."),
    ],
)
def test_a_context_of_another_width_is_refused(shape, message, contextual):
    with pytest.raises(ValueError, match=message):
        contextual.set_context(torch.zeros(shape))


@pytest.mark.parametrize("value, dtype", [(torch.nan, torch.float64), (torch.inf, torch.float64), (1e6, torch.float16)])
def test_a_refused_context_changes_nothing(contextual, batch, documents, value, dtype):
    """A number may be infinite only in the dtype of the model."""
    contextual.to(dtype)
    for vectors in (None, embed(contextual, documents, embeds_context=True)):
        contextual.set_context(vectors)
        config, before = contextual.config.to_dict(), embed(contextual, *batch)
        for refused in (torch.full((SIZE + 1, 32), value), torch.zeros(SIZE, 31)):
            with pytest.raises(ValueError, match=r"infinite values or NaN|have shape"):
                contextual.set_context(refused)
        assert torch.equal(embed(contextual, *batch), before) and contextual.config.to_dict() == config


def test_without_its_context_a_model_has_the_number_of_context_vectors_that_it_was_made_with(
    contextual, batch, tmp_path
):
    before = embed(contextual, *batch)
    contextual.set_context(torch.randn(SIZE + 2, 32))
    contextual.set_context(torch.randn(SIZE + 1, 32))
    contextual.save_pretrained(tmp_path)
    for model in (contextual, AutoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()):
        assert model.config.context_size == SIZE + 1
        model.set_context(None)
        assert model.config.context_size == SIZE and torch.equal(embed(model, *batch), before)


def test_another_number_of_context_vectors_needs_set_context(contextual, batch):
    context = torch.randn(SIZE + 1, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"dataset_embeddings has shape \(6, 32\), but this model reads \(5, 32\)"):
        contextual(*batch, dataset_embeddings=context)
    contextual.set_context(context)
    assert contextual.config.context_size == SIZE + 1 and embed(contextual, *batch).isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda ids, mask: (ids, mask * 0), "row 0 of attention_mask has no real token"),
        (lambda ids, mask: (ids + 96, mask), "input_ids contains 1.., but the ids of the vocabulary are 0 to 95"),
        (lambda ids, mask: (ids - 96, mask), "input_ids contains -"),
        (
            lambda ids, mask: (ids, mask[:, :2]),
            r"attention_mask has shape \(3, 2\), but the input has shape \(3, 7\)",
        ),
        (lambda ids, mask: (ids[:0], mask[:0]), "give at least one token"),
        (lambda ids, mask: (ids[0], mask[0]), "it must be .rows, columns"),
    ],
)
def test_an_invalid_text_is_refused(change, message, contextual, batch):
    with pytest.raises(ValueError, match=message):
        contextual(*change(*batch))


@pytest.mark.parametrize(
    "num_rows, inputs, message",
    [
        (1, {"cu_seq_lens_q": [0, 4]}, "from 0 to 4; it must go from 0 to 6"),
        (2, {"cu_seq_lens_q": [0, 3]}, "cu_seq_lens describes one packed row, but the input has 2 rows"),
        (1, {"cu_seq_lens_q": [0, 4, 6], "seq_idx": [[0, 0, 0, 1, 1, 1]]}, "at 0, 4, but seq_idx at 0, 3"),
        (1, {"cu_seq_lens_q": [0, 4, 6], "max_length_q": 3}, "max_length_q=3 is less than the longest sequence, 4"),
        (1, {"cu_seq_lens_q": [0, 4, 6], "attention_mask": [[1] * 6]}, "both cu_seq_lens and attention_mask are given"),
        (1, {"attention_mask": [[[[1] * 6]]]}, "reads a mask of the shape of input_ids"),
        (1, {"attention_mask": [[1.0, 0.5, 0.0, 0.0, 0.0, 0.0]]}, "contains values other than 0 and 1"),
    ],
)
def test_contradictory_inputs_are_refused_as_by_the_encoder(num_rows, inputs, message, contextual):
    tensors = {name: value if isinstance(value, int) else torch.tensor(value) for name, value in inputs.items()}
    with pytest.raises(ValueError, match=message):
        contextual(torch.full((num_rows, 6), 7), **tensors)


def test_packed_texts_are_refused_while_compiling(contextual, batch):
    compiled = torch.compile(contextual, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="the number of packed texts is unknown while compiling"):
        compiled(batch[0][:1], seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))


def test_a_resized_stage_is_refused(contextual, tmp_path):
    contextual.first_stage.resize_token_embeddings(100, mean_resizing=False)
    for use in (lambda: contextual(torch.tensor([[99]])), lambda: contextual.save_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=r"second_stage.encoder has 96 tokens, but config.vocab_size=100; call"):
            use()


def test_an_unknown_argument_is_refused(contextual, batch):
    with pytest.raises(TypeError, match="has no argument labels"):
        contextual(*batch, labels=batch[0])
    assert contextual(*batch, output_hidden_states=False).sentence_embedding is not None
