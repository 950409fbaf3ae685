"""Every state, probability and logit against an independent float64 oracle, for every attention and layout."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

pytestmark = pytest.mark.compat

# Largest error over largest value. In float64 only the order of summation differs; float32 has 24 bits.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}

KERNELS = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
OPTIONS = {name: {"attn_implementation": kernel} for name, kernel in KERNELS.items()}
OPTIONS |= {"default": {}, "padded": {"unpad_inputs": False}}


@pytest.fixture(params=OPTIONS, ids=str)
def options(request):
    return OPTIONS[request.param]


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


def assert_close(actual, wanted, dtype, where=None):
    """Compare in float64, relative to the largest wanted value, where `where` is true."""
    actual, wanted = actual.double(), wanted.double()
    if where is not None:
        actual, wanted = actual[where], wanted[where]
    error = ((actual - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= TOLERANCE[dtype], f"relative error {error:.1e}"


def test_the_published_checkpoint_has_no_missing_or_unexpected_key(reference):
    for auto_class, folder in zip((AutoModelForMaskedLM, AutoModelForSequenceClassification), reference[:2]):
        _, info = auto_class.from_pretrained(folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_every_state_and_logit_agrees_with_the_oracle(reference, options, dtype):
    folder, _, expected = reference
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype, **options).eval()
    is_real = expected["attention_mask"].bool()
    with torch.no_grad():
        outputs = model(expected["input_ids"], attention_mask=expected["attention_mask"], output_hidden_states=True)
    assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1
    for i, state in enumerate(outputs.hidden_states[:-1]):
        assert_close(state, expected[f"residual_stream.{i}"], dtype, is_real)
    assert_close(outputs.hidden_states[-1], expected["last_hidden_state"], dtype, is_real)
    assert_close(outputs.logits, expected["mlm_logits"], dtype, is_real)


def test_attention_probabilities_agree_with_the_oracle(reference, options, dtype):
    folder, _, expected = reference
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype, **options).eval()
    is_real = expected["attention_mask"].bool()
    with torch.no_grad():
        outputs = model(expected["input_ids"], attention_mask=expected["attention_mask"], output_attentions=True)
    pairs = (is_real[:, None, :, None] & is_real[:, None, None, :]).expand_as(outputs.attentions[0])
    for i, probabilities in enumerate(outputs.attentions):
        assert_close(probabilities, expected[f"attentions.{i}"], dtype, pairs)
    assert_close(outputs.logits, expected["mlm_logits"], dtype, is_real)


def test_classifier_logits_agree_with_the_oracle(reference, options, dtype):
    _, folder, expected = reference
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, **options).eval()
    with torch.no_grad():
        logits = model(expected["input_ids"], attention_mask=expected["attention_mask"]).logits
    assert_close(logits, expected["classifier_logits"], dtype)


@pytest.mark.parametrize("names", ["cu_seq_lens_q", "cu_seqlens", "position_ids", "cu_seq_lens_q position_ids"])
def test_a_packed_row_agrees_with_the_oracle(reference, options, dtype, names):
    folder, _, expected = reference
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype, **options).eval()
    given = {"position_ids": expected["packed.position_ids"]}
    given |= dict.fromkeys(("cu_seq_lens_q", "cu_seqlens"), expected["packed.cu_seq_lens"].int())
    with torch.no_grad():
        marks = {name: given[name] for name in names.split()}
        states = model.model(expected["packed.input_ids"], **marks).last_hidden_state
    assert_close(states, expected["packed.last_hidden_state"], dtype)
