"""The fast paths against float64 and against their plain twins, and where they must not run."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.attention_neobert import rotary_table
from neobert_hf.kernels_neobert import (
    CHUNK_TOKENS,
    SHORTEST_BLOCKED,
    Linear,
    RMSNorm,
    blocked_attention,
    onednn_is_best,
    pack_weights,
    runs_fast,
    split_and_rotate,
    swiglu,
)
from neobert_hf.layout_neobert import make_layout

FAST_DTYPES = [
    pytest.param(
        dtype, marks=pytest.mark.skipif(not onednn_is_best(dtype), reason=f"this CPU's best {dtype} is not oneDNN's")
    )
    for dtype in (torch.bfloat16, torch.float32)
]
NUM_TOKENS = (1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 7)  # less than a chunk, one, and a rest
EVALUATING = nn.Module().eval()


def plain(function, *arguments):
    """What `function` computes on its plain path."""
    with torch.enable_grad():
        return function(*arguments)


def largest_error(actual, wanted):
    return ((actual.double() - wanted).abs().max() / wanted.abs().max()).item()


# ----------------------------------------------------------------------------------------------------------------------
# Where they run
# ----------------------------------------------------------------------------------------------------------------------


def test_fast_paths_run_only_where_nobody_needs_the_plain_one():
    x = torch.randn(2, 3)
    with torch.no_grad():
        assert runs_fast(x, EVALUATING)
        assert runs_fast(x.bfloat16(), EVALUATING)
        assert not runs_fast(x, nn.Module().train())
        assert not runs_fast(x.half(), EVALUATING)
        assert not runs_fast(x.double(), EVALUATING)
        assert not runs_fast(x.to("meta"), EVALUATING)
        torch.func.vmap(lambda row: [row, pytest.fail("fast under vmap") if runs_fast(row, EVALUATING) else None][0])(x)
    assert not runs_fast(x, EVALUATING)


def test_nothing_that_a_hook_holds_changes_afterwards(tiny_config):
    model = NeoBERTModel(tiny_config).eval()
    held = []

    def hold(module, inputs, output):
        tensors = [value for value in (*inputs, *(output if isinstance(output, tuple) else [output]))]
        held.extend((value, value.clone()) for value in tensors if isinstance(value, torch.Tensor))

    for module in model.modules():
        if module is not model:
            module.register_forward_hook(hold)
    with torch.inference_mode():
        model(torch.randint(5, 90, (2, 70)), output_hidden_states=True)
    assert len(held) > 20
    assert all(torch.equal(value, before) for value, before in held)


@pytest.mark.parametrize("dtype", FAST_DTYPES)
def test_a_fast_model_is_as_exact_as_a_plain_one(dtype):
    """Against float64. The ladder's third rung for bf16: at most 3 times the error of the plain model; fp32: 1e-5."""
    config = NeoBERTConfig(vocab_size=96, num_hidden_layers=3)
    model = NeoBERTModel(config).eval()
    ids, mask = torch.randint(5, 90, (3, 500)), torch.ones(3, 500, dtype=torch.long)
    mask[1, 390:], mask[2, :130] = 0, 0

    @torch.no_grad()
    def states(model):
        return model(ids, attention_mask=mask).last_hidden_state[mask.bool()]

    wanted = states(copy.deepcopy(model).double())
    model = model.to(dtype)
    fast = largest_error(states(model), wanted)
    packed = largest_error(states(copy.deepcopy(model).pack_weights()), wanted)
    model.set_attn_implementation("sdpa")
    with torch.enable_grad():
        plain_states = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    allowed = 3 * largest_error(plain_states, wanted) if dtype == torch.bfloat16 else 1e-5
    assert max(fast, packed) <= allowed


# ----------------------------------------------------------------------------------------------------------------------
# Products
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FAST_DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_and_unpacked_products_are_exact_to_the_dtype(dtype, bias):
    layer = Linear(96, 40, bias=bias).to(dtype).eval()
    for shape in ((1,), (17,), (2, 5)):
        x = torch.randn(*shape, 96, dtype=dtype)
        wanted = F.linear(x.double(), *(p.double() for p in layer.parameters()))
        tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps  # sums of 96 terms; one rounding
        with torch.inference_mode():
            assert largest_error(layer(x), wanted) < tolerance
            layer.pack()
            assert largest_error(layer(x), wanted) < tolerance


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "through data": lambda layer: layer.weight.data.mul_(2),
    "a new tensor": lambda layer: setattr(layer.weight, "data", 2 * layer.weight.data),
    "a new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(2 * layer.weight)),
    "loaded": lambda layer: layer.load_state_dict({"weight": 2 * layer.weight}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_packed_weight_that_changed_is_not_used(change, caplog):
    if not onednn_is_best(torch.float32):
        pytest.skip("this CPU's best float32 products are not oneDNN's")
    from transformers.utils import logging

    logging.warning_once.cache_clear()
    layer, x = Linear(64, 64, bias=False).eval(), torch.randn(3, 64)
    pack_weights(layer)
    with torch.no_grad():
        before = layer(x)
        CHANGES[change](layer)
        torch.testing.assert_close(layer(x), 2 * before)
    assert "have changed after pack_weights()" in caplog.text


def test_packing_stays_out_of_copies_files_and_training():
    if not onednn_is_best(torch.float32):
        pytest.skip("this CPU's best float32 products are not oneDNN's")
    layer, x = Linear(64, 64), torch.randn(3, 64)
    wanted = layer(x).detach()
    pack_weights(layer)
    assert set(layer.state_dict()) == {"weight", "bias"}
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.train()):
        out = twin(x)
        assert torch.equal(out, wanted)
        out.sum().backward()
        assert twin.weight.grad is not None


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float16)])
def test_weights_that_cannot_be_packed_are_refused(tiny_config, device, dtype):
    with pytest.raises(ValueError, match="cannot be packed here"):
        NeoBERTModel(tiny_config).to(device=device, dtype=dtype).pack_weights()


# ----------------------------------------------------------------------------------------------------------------------
# Norm, SwiGLU and rotary positions
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_norm_is_rounded_once(dtype, num_tokens):
    norm = RMSNorm(48, eps=1e-5).to(dtype).eval()
    nn.init.normal_(norm.weight)
    x = (torch.randn(num_tokens, 48) * torch.logspace(-3, 3, num_tokens)[:, None]).to(dtype)
    x[0] = 0
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    with torch.no_grad():
        actual = norm(x)
    assert actual.dtype == dtype
    # half a unit in the last place, and fp32 arithmetic before it; up to a chunk F.rms_norm runs, which rounds twice
    times = 4 if dtype == torch.float32 else 1 if num_tokens <= CHUNK_TOKENS else 0.5
    allowed = times * torch.finfo(dtype).eps * wanted.abs() * 1.01
    assert ((actual.double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_fast_swiglu_is_the_plain_one_bit_for_bit(dtype, num_tokens):
    gate_up = torch.randn(num_tokens, 96, dtype=dtype)
    before = gate_up.clone()
    with torch.no_grad():
        actual = swiglu(gate_up, EVALUATING)
    assert torch.equal(actual, plain(swiglu, gate_up, EVALUATING))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_fast_rotation_is_the_plain_one(dtype, num_tokens):
    config = NeoBERTConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=num_tokens)
    layout = make_layout(torch.full((1, num_tokens), 5), "sdpa", vocab_size=10)
    table, qkv = rotary_table(config, layout, dtype), torch.randn(num_tokens, 2, 3, 16, dtype=dtype)
    before = qkv.clone()
    with torch.no_grad():
        fast = split_and_rotate(qkv, table, EVALUATING)
    for actual, wanted in zip(fast, plain(split_and_rotate, qkv, table, EVALUATING)):
        # the same fp32 arithmetic, in which a product and a sum may be fused: it can fall to the other side of a rounding
        torch.testing.assert_close(actual, wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(qkv, before)


# ----------------------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------------------


def attend_in_float64(q, k, v, lengths):
    """One sequence and one head at a time, from the definition."""
    outputs = []
    for q_n, k_n, v_n in zip(*(x.double().split(lengths) for x in (q, k, v))):
        heads = [(q_n[:, h] @ k_n[:, h].T / math.sqrt(q.shape[-1])).softmax(-1) @ v_n[:, h] for h in range(q.shape[1])]
        outputs.append(torch.stack(heads, 1))
    return torch.cat(outputs)


def attend_by_sdpa(q, k, v, lengths):
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)))
    return torch.cat([F.scaled_dot_product_attention(*part)[0].transpose(0, 1) for part in parts])


LENGTHS = {
    "one token": (1,),
    "below the shortest": (5, 63, 2),
    "around a block of rows": (255, 256, 257),
    "one length": (96,) * 5,
    "several blocks": (700, 1300),
}


@pytest.mark.parametrize("dtype", FAST_DTYPES)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["flat", "peaked"])
def test_blocked_attention_is_softmax_attention(dtype, name, scale):
    lengths = LENGTHS[name]
    q, k, v = (torch.randn(sum(lengths), 3, 16).to(dtype) for _ in range(3))
    q = q * scale
    wanted = attend_in_float64(q, k, v, lengths)
    actual = blocked_attention(q, k, v, lengths)
    if dtype == torch.float32:
        assert largest_error(actual, wanted) < 1e-5
    else:  # scores are rounded to bf16 before the exponential, as in the plain softmax(q k^T) v in bf16
        rounded = torch.cat(
            [
                ((q_n.transpose(0, 1) @ k_n.permute(1, 2, 0)) / 4).softmax(-1) @ v_n.transpose(0, 1)
                for q_n, k_n, v_n in zip(*(x.split(lengths) for x in (q, k, v)))
            ],
            1,
        ).transpose(0, 1)
        assert largest_error(actual, wanted) <= 3 * largest_error(rounded, wanted) + 2**-8


@pytest.mark.parametrize("dtype", FAST_DTYPES)
@pytest.mark.parametrize("shift", [-3000.0, -200.0, 200.0, 3000.0])
def test_scores_beyond_the_range_of_the_exponential_are_shifted(dtype, shift):
    """In one head of one sequence only, and its neighbours keep every bit."""
    length = SHORTEST_BLOCKED[dtype]
    q, k, v = (torch.randn(2 * length, 2, 16) for _ in range(3))
    plain_scores = [x.to(dtype) for x in (q, k, v)]
    q[:length, 1, 0], k[:length, 1, 0] = 4 * shift / abs(shift), abs(shift)  # adds `shift` to every score
    shifted_scores = [x.to(dtype) for x in (q, k, v)]
    lengths = (length, length)
    before, after = blocked_attention(*plain_scores, lengths), blocked_attention(*shifted_scores, lengths)
    assert torch.equal(before[:, 0], after[:, 0])
    assert torch.equal(before[length:], after[length:])
    wanted, actual = attend_in_float64(*shifted_scores, lengths)[:length, 1], after[:length, 1]
    assert actual.isfinite().all()
    assert actual.abs().max() <= shifted_scores[2].abs().max()  # a mean of values
    # keys and scores are rounded at the size of `shift`, and an error in a score is a factor on a weight
    rounding = 4 * abs(shift) * torch.finfo(dtype).eps
    assert rounding > 1 or largest_error(actual, wanted) < rounding


@pytest.mark.parametrize("dtype", FAST_DTYPES)
def test_a_value_that_is_not_a_number_stays_in_its_sequence(dtype):
    length = SHORTEST_BLOCKED[dtype]
    q, k, v = (torch.randn(3 * length, 2, 16).to(dtype) for _ in range(3))
    clean = blocked_attention(q, k, v, (length,) * 3)
    k[length, 0, 0] = float("nan")
    out = blocked_attention(q, k, v, (length,) * 3)
    assert out[length : 2 * length, 0].isnan().all()
    assert torch.equal(out[:length], clean[:length]) and torch.equal(out[2 * length :], clean[2 * length :])


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 450), min_size=1, max_size=6), seed=st.integers(0, 2**31), data=st.data())
def test_blocked_attention_never_mixes_sequences(lengths, seed, data):
    dtypes = [dtype for dtype in (torch.bfloat16, torch.float32) if onednn_is_best(dtype)] or [torch.bfloat16]
    generator = torch.Generator().manual_seed(seed)
    dtype = data.draw(st.sampled_from(dtypes))
    q, k, v = (torch.randn(sum(lengths), 2, 16, generator=generator).to(dtype) for _ in range(3))
    changed = data.draw(st.integers(0, len(lengths) - 1))
    start = sum(lengths[:changed])
    part = slice(start, start + lengths[changed])
    before = blocked_attention(q, k, v, tuple(lengths))
    others = torch.ones(len(q), dtype=torch.bool)
    others[part] = False
    for x in (q, k, v):
        x[part] = 100 * torch.randn(x[part].shape, generator=generator)
    after = blocked_attention(q, k, v, tuple(lengths))
    assert torch.equal(before[others], after[others])
