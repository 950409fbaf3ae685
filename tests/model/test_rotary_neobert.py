"""Rotary positions against the formulas of transformers, and the fast rotation against the plain one."""

import pytest
import torch
from conftest import packed_plan

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.model.rotary_neobert import CHUNK_TOKENS, rotary_table, split_and_rotate, split_and_rotate_fast

CPU = torch.device("cpu")


ROPE = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with its own betas": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
}
ROPE["yarn with its own betas"] |= {"beta_fast": 20, "beta_slow": 2, "attention_factor": 1.2}


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


def test_no_module_holds_a_buffer(tiny_config):
    """A buffer that __init__ computes is lost when a model is built on the meta device, as in transformers 5."""
    assert not list(NeoBERTModel(tiny_config).buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
# less than one chunk, one chunk, two chunks and a remainder
@pytest.mark.parametrize("num_tokens", [1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 7])
@pytest.mark.parametrize("by_head", [True, False])
def test_the_rotation_kernel_equals_its_reference_implementation(dtype, num_tokens, by_head):
    config = NeoBERTConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=num_tokens)
    layout = packed_plan([num_tokens]).layout
    table, qkv = rotary_table(config, layout, dtype), torch.randn(num_tokens, 2, 3, 16, dtype=dtype)
    before = qkv.clone()
    fast = split_and_rotate_fast(qkv, torch.view_as_complex(table), by_head)
    for actual, wanted in zip(fast, split_and_rotate(qkv if by_head else qkv.float(), table)):
        # the same fp32 arithmetic, but a product and a sum may be fused, which changes the rounding
        torch.testing.assert_close(actual, wanted, rtol=torch.finfo(actual.dtype).eps, atol=1e-6)
    assert torch.equal(qkv, before)
