"""Rotary positions against the formulas of transformers, and the choice of an attention backend."""

import pytest
import torch
from conftest import packed_plan
from transformers import AutoModel
from transformers.utils import logging

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.model.backends_neobert import Situation, choose_backend
from neobert_hf.model.machine_neobert import onednn_is_best
from neobert_hf.model.rotary_neobert import rotary_table, split_and_rotate

CPU = torch.device("cpu")


ROPE = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with its own betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 20,
        "beta_slow": 2,
        "attention_factor": 1.2,
    },
}


@pytest.mark.parametrize("name", ROPE)
def test_rotary_frequencies_equal_those_of_transformers(name):
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    rope = {"rope_type": name, **ROPE[name], "rope_theta": 5000.0}
    config = NeoBERTConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=64, rope_parameters=rope)
    length = 100  # beyond max_position_embeddings, where dynamic scaling starts
    cos, sin = rotary_table(config, packed_plan([length]).layout, torch.float64).unbind(-1)
    if name == "default":
        frequencies, amplitude = 5000.0 ** (-torch.arange(0, 64, 2) / 64), 1.0
    else:
        frequencies, amplitude = functions[config.rope_parameters["rope_type"]](config, CPU, seq_len=length)
    angles = torch.arange(length)[:, None] * frequencies.double()
    # transformers keeps its frequencies in float32: 100 positions times 6e-8
    assert (cos - amplitude * angles.cos()).abs().max() < 2e-5
    assert (sin - amplitude * angles.sin()).abs().max() < 2e-5


def test_dynamic_scaling_of_a_document_does_not_depend_on_its_neighbours():
    config = NeoBERTConfig(max_position_embeddings=8, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    alone = rotary_table(config, packed_plan([12]).layout, torch.float32)
    packed = rotary_table(config, packed_plan([12, 40, 3]).layout, torch.float32)
    assert torch.equal(packed[:12], alone)
    short = rotary_table(config, packed_plan([3]).layout, torch.float32)
    assert torch.equal(packed[-3:], short)


def test_dynamic_scaling_is_the_same_packed_and_padded(tiny_config):
    tiny_config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    tiny_config.max_position_embeddings = 4
    model = NeoBERTModel(tiny_config).double().eval()
    ids, mask = torch.randint(5, 90, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    mask[0, 7:], mask[1, :3], mask[2, 4:6] = 0, 0, 0
    for positions in (None, torch.arange(12)):
        states = []
        for unpad in (True, False):
            model.config.unpad_inputs = unpad
            with torch.no_grad():
                states.append(model(ids, attention_mask=mask, position_ids=positions).last_hidden_state)
        assert (states[0] - states[1]).abs().max() < 1e-10


def test_rotation_preserves_pair_lengths_position_zero_and_values():
    qkv = torch.randn(5, 2, 3, 8, dtype=torch.float64)
    angles = torch.arange(5, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=torch.float64)
    table = torch.stack((angles.cos(), angles.sin()), -1)
    q, k, v = split_and_rotate(qkv, table)
    assert torch.equal(v, qkv[:, :, 2])
    for before, after in ((qkv[:, :, 0], q), (qkv[:, :, 1], k)):
        assert torch.equal(after[0], before[0])
        lengths = [y.unflatten(-1, (-1, 2)).norm(dim=-1) for y in (before, after)]
        assert (lengths[0] - lengths[1]).abs().max() < 1e-12


def test_no_module_holds_a_buffer(tiny_config):
    """A buffer that __init__ computes is lost when a model is built on the meta device, as in transformers 5."""
    assert not list(NeoBERTModel(tiny_config).buffers())


def test_auto_chooses_the_best_backend_for_this_machine(checkpoint):
    model = AutoModel.from_pretrained(checkpoint)
    assert model.config._attn_implementation == "auto"
    packed = Situation(CPU, torch.bfloat16, 64, is_packed=True)
    fast = packed._replace(is_fast=True)
    assert choose_backend("auto", packed) == "sdpa"
    assert choose_backend("auto", fast) == ("cpu_tiled" if onednn_is_best(torch.bfloat16) else "sdpa")
    assert choose_backend("auto", fast._replace(dtype=torch.float32)) == "sdpa"
    assert choose_backend("auto", fast._replace(is_packed=False)) == "sdpa"
    assert choose_backend("auto", packed._replace(is_packed=False), need_weights=True) == "eager"


def test_attention_probabilities_use_eager_attention_with_a_warning(model, caplog):
    logging.warning_once.cache_clear()  # the warning appears once, perhaps in an earlier test
    with torch.no_grad():
        attentions = model(torch.tensor([[5, 6, 7]]), output_attentions=True).attentions
    assert all(torch.allclose(p.sum(-1), torch.ones(1, 4, 3)) for p in attentions)
    assert "this forward runs 'eager' instead of 'auto'" in caplog.text


def test_a_registered_attention_function_separates_documents_and_rows(model, expected):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("my_sdpa", sdpa_attention_forward)
    packed = {"input_ids": expected["packed.input_ids"], "cu_seq_lens_q": expected["packed.cu_seq_lens"]}
    padded = {name: expected[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        wanted = [model(**inputs).logits for inputs in (packed, padded)]
        model.set_attn_implementation("my_sdpa")
        for inputs, logits in zip((packed, padded), wanted):
            torch.testing.assert_close(model(**inputs).logits, logits, rtol=1e-4, atol=1e-4)


MISSING = {
    "xformers": (ImportError, "pip install 'xformers"),
    "flash_attention_2": (ImportError, "pip install flash-attn"),
    "no_such_attention": (ValueError, "choose 'flash_attention_3', .*'flex_attention'; or omit it"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_backend_that_is_not_installed_is_refused_on_load(checkpoint, name, monkeypatch):
    if name == "flash_attention_2" and torch.cuda.is_available():
        pytest.skip("flash-attn may be installed where there is a GPU")
    from neobert_hf.model import attention_neobert

    monkeypatch.setattr(attention_neobert, "memory_efficient_attention", None)
    error, message = MISSING[name]
    with pytest.raises(error, match=message):
        AutoModel.from_pretrained(checkpoint, attn_implementation=name)
