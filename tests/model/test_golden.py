"""The arithmetic: every state, probability and logit against an independent float64 oracle, in every way of running."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

pytestmark = pytest.mark.compat

# Largest error over largest value. float64 leaves room for the order of summation only, float32 for its 24 bits.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}

WAYS = {
    "default": {},
    "sdpa": {"attn_implementation": "sdpa"},
    "eager": {"attn_implementation": "eager"},
    "flex": {"attn_implementation": "flex_attention"},
    "padded": {"unpad_inputs": False},
}


@pytest.fixture(params=WAYS, ids=str)
def way(request):
    return WAYS[request.param]


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


def test_the_published_checkpoint_has_no_missing_or_unexpected_key(judged):
    for auto_class, folder in zip((AutoModelForMaskedLM, AutoModelForSequenceClassification), judged[:2]):
        _, info = auto_class.from_pretrained(folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_every_state_and_logit_agrees_with_the_oracle(judged, way, dtype):
    folder, _, expected = judged
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype, **way).eval()
    is_real = expected["attention_mask"].bool()
    with torch.no_grad():
        outputs = model(expected["input_ids"], attention_mask=expected["attention_mask"], output_hidden_states=True)
    assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1
    for i, state in enumerate(outputs.hidden_states[:-1]):
        assert_close(state, expected[f"residual_stream.{i}"], dtype, is_real)
    assert_close(outputs.hidden_states[-1], expected["last_hidden_state"], dtype, is_real)
    assert_close(outputs.logits, expected["mlm_logits"], dtype, is_real)


def test_attention_probabilities_agree_with_the_oracle(judged, way, dtype):
    folder, _, expected = judged
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype, **way).eval()
    is_real = expected["attention_mask"].bool()
    with torch.no_grad():
        outputs = model(expected["input_ids"], attention_mask=expected["attention_mask"], output_attentions=True)
    pairs = (is_real[:, None, :, None] & is_real[:, None, None, :]).expand_as(outputs.attentions[0])
    for i, probabilities in enumerate(outputs.attentions):
        assert_close(probabilities, expected[f"attentions.{i}"], dtype, pairs)
    assert_close(outputs.logits, expected["mlm_logits"], dtype, is_real)


def test_classifier_logits_agree_with_the_oracle(judged, way, dtype):
    _, folder, expected = judged
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, **way).eval()
    with torch.no_grad():
        logits = model(expected["input_ids"], attention_mask=expected["attention_mask"]).logits
    assert_close(logits, expected["classifier_logits"], dtype)


@pytest.mark.parametrize(
    "names", [("cu_seq_lens_q",), ("cu_seqlens",), ("position_ids",), ("cu_seq_lens_q", "position_ids")]
)
def test_a_packed_row_agrees_with_the_oracle(judged, way, dtype, names):
    folder, _, expected = judged
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype, **way).eval()
    given = {"position_ids": expected["packed.position_ids"]}
    given |= dict.fromkeys(("cu_seq_lens_q", "cu_seqlens"), expected["packed.cu_seq_lens"].int())
    with torch.no_grad():
        states = model.model(expected["packed.input_ids"], **{name: given[name] for name in names}).last_hidden_state
    assert_close(states, expected["packed.last_hidden_state"], dtype)
