"""The CPU inference kernels against float64 and their reference implementations, and where they must not run."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils import logging

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.model import backends_neobert, kernels_neobert, machine_neobert
from neobert_hf.model.blocks_neobert import RMSNorm, normalize
from neobert_hf.model.kernels_neobert import (
    SHORTEST_TILED,
    InferenceLinear,
    linear,
    multiply_by_onednn,
    rms_norm,
    runs_fast,
)

BFLOAT16 = torch.bfloat16
DTYPES = [BFLOAT16, torch.float32]
EVALUATING = nn.Module().eval()
MULTIPLY = {"plain": None, "torch": F.linear, "onednn": multiply_by_onednn, "packed": multiply_by_onednn}


def onednn_runs(dtype):
    """Whether oneDNN can compute in `dtype` at all here, fast or not."""
    if machine_neobert.TORCH.onednn_linear is None or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or machine_neobert.TORCH.has_onednn_bf16()


def needs_onednn(dtype):
    """Skip a test if oneDNN has no product in `dtype`: without AVX-512 it cannot even emulate bf16."""
    if not onednn_runs(dtype):
        pytest.skip(f"oneDNN in this torch, on this processor, has no product in {dtype}")


def largest_error(actual, wanted):
    return ((actual.double() - wanted).abs().max() / wanted.abs().max()).item()


def test_kernels_run_only_for_inference_on_a_cpu():
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


def test_tensors_that_a_hook_keeps_never_change(tiny_config):
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


@pytest.fixture(scope="module")
def wide_model():
    """Two layers with heads of the published width, a padded batch, and its states in float64."""
    shape = dict(num_hidden_layers=2, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    config = NeoBERTConfig(vocab_size=96, **shape)
    model = NeoBERTModel(config).eval()
    ids, mask = torch.randint(5, 90, (3, 300)), torch.ones(3, 300, dtype=torch.long)
    mask[1, 190:], mask[2, :130] = 0, 0
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    return model, {"input_ids": ids, "attention_mask": mask}, wanted


@pytest.mark.parametrize("dtype, attention", [(torch.float32, "sdpa"), (BFLOAT16, "sdpa"), (BFLOAT16, "cpu_tiled")])
@pytest.mark.parametrize("kernels", ["torch", "onednn", "packed"])
def test_kernels_are_as_precise_as_the_reference_implementations(wide_model, monkeypatch, dtype, kernels, attention):
    """Against float64; bf16: at most 3 times the error of the reference implementations, fp32: 1e-5."""
    if kernels != "torch":
        needs_onednn(dtype)
    model, inputs, wanted = wide_model
    real = inputs["attention_mask"].bool()
    model = copy.deepcopy(model).to(dtype)
    with torch.enable_grad():
        plain = model(**inputs, output_hidden_states=True)
    monkeypatch.setattr(kernels_neobert, "onednn_is_best", lambda dtype, num_rows: kernels != "torch")
    monkeypatch.setattr(backends_neobert, "onednn_is_best", lambda dtype: True)
    if kernels == "packed":
        model = neobert_hf.inference_copy(model)
        assert sum(module.weight.is_mkldnn for module in model.modules() if type(module) is InferenceLinear) == 4 * 2
    model.set_attn_implementation(attention)
    with torch.no_grad():
        fast = model(**inputs, output_hidden_states=True)
    assert fast.last_hidden_state.dtype == dtype
    allowed = 1e-5
    if dtype == torch.bfloat16:
        allowed = 3 * largest_error(plain.last_hidden_state[real], wanted)
    assert largest_error(fast.last_hidden_state[real], wanted) <= allowed


@pytest.mark.parametrize("has_instructions", ["0", "1"])
def test_slow_bf16_is_warned_about_once_with_the_solution(tiny_config, monkeypatch, caplog, has_instructions):
    monkeypatch.setenv("NEOBERT_CPU_BF16", has_instructions)
    logging.warning_once.cache_clear()
    model = NeoBERTModel(tiny_config).bfloat16().eval()
    for _ in range(2):
        model(torch.full((1, 3), 5))
    warnings = [record for record in caplog.records if "bfloat16 is slower than float32 on this CPU" in record.message]
    assert len(warnings) == (1 if has_instructions == "0" else 0)
    assert all("dtype=torch.float32" in record.message for record in warnings)


@pytest.fixture
def empty_cache_of_choices():
    """Clear the cached choices of attention, before and after a test."""
    backends_neobert._find_best_backend.cache_clear()
    yield
    backends_neobert._find_best_backend.cache_clear()


@pytest.mark.parametrize("name", vars(machine_neobert.TORCH))
def test_a_torch_without_a_private_name_computes_the_same(wide_model, monkeypatch, empty_cache_of_choices, name):
    model, inputs, wanted = wide_model
    monkeypatch.setattr(machine_neobert.TORCH, name, None)
    model = neobert_hf.inference_copy(model)
    with torch.inference_mode():
        states = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
    assert largest_error(states, wanted) <= 1e-5


class Doubled(torch.nn.Module):
    """A layer in the place of another, as adapters put it there."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.eps = layer, getattr(layer, "eps", None)

    def forward(self, x):
        """Twice the output of the layer."""
        return 2 * self.layer(x)


@pytest.mark.parametrize("name", ["attention_norm", "ffn_norm", "ffn"])
def test_a_layer_that_replaces_a_norm_or_the_feed_forward_is_called(wide_model, name):
    model, inputs, _ = wide_model
    model, inputs = copy.deepcopy(model), {"input_ids": inputs["input_ids"][:1, :20]}
    block = model.transformer_encoder[1]
    setattr(block, name, Doubled(getattr(block, name)))
    wanted = model(**inputs).last_hidden_state.detach()  # with gradients, the plain modules run
    with torch.inference_mode():
        torch.testing.assert_close(model(**inputs).last_hidden_state, wanted, rtol=1e-5, atol=1e-5)  # fp32


def test_a_hook_on_any_module_is_called_and_its_output_is_used(wide_model):
    """A fused operation must not skip a hook silently."""
    model, inputs, _ = wide_model
    model, inputs = copy.deepcopy(model), {"input_ids": inputs["input_ids"][:1, :20]}
    block = model.transformer_encoder[1]
    with torch.inference_mode():
        wanted = model(**inputs).last_hidden_state
        norms, layers = (block.attention_norm, block.ffn_norm), (block.ffn.w12, block.ffn.w3)
        for module in (block.qkv, block.wo, block.ffn, *layers, *norms):
            called = []
            handle = module.register_forward_hook(lambda *_, called=called: called.append(True))
            torch.testing.assert_close(model(**inputs).last_hidden_state, wanted, rtol=1e-5, atol=1e-5)  # fp32
            handle.remove()
            handle = module.register_forward_hook(lambda module, inputs, output: 0 * output)
            assert called and not torch.allclose(model(**inputs).last_hidden_state, wanted, atol=1e-3)
            handle.remove()


@pytest.mark.parametrize("makes_copy", [False, True], ids=["model", "copy"])
def test_a_hook_on_all_modules_acts_in_inference(wide_model, makes_copy):
    model, inputs, _ = wide_model
    model, ids = neobert_hf.inference_copy(model) if makes_copy else model, inputs["input_ids"][:1, :20]
    handle = register_module_forward_hook(lambda module, _, output: 2 * output if module is norm else None)
    norm, linear = model.transformer_encoder[1].ffn_norm, model.transformer_encoder[0].qkv
    called = register_module_forward_pre_hook(lambda module, _: seen.append(module))
    seen = []
    try:
        wanted = model(ids).last_hidden_state.detach()  # with gradients, the plain modules run
        seen.clear()
        with torch.inference_mode():
            torch.testing.assert_close(model(ids).last_hidden_state, wanted, rtol=1e-5, atol=1e-5)  # fp32
        assert {id(norm), id(linear)} <= set(map(id, seen))
    finally:
        handle.remove()
        called.remove()
    assert not torch.allclose(model(ids).last_hidden_state, wanted, atol=1e-3)


@pytest.mark.parametrize("makes_copy", [False, True], ids=["model", "copy"])
def test_a_mode_counts_every_product_in_inference(wide_model, makes_copy):
    model, inputs, _ = wide_model
    model, ids = neobert_hf.inference_copy(model) if makes_copy else model, inputs["input_ids"][:1, :20]
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(ids)
    config = model.config
    num_layers, width = config.num_hidden_layers, config.hidden_size
    per_token = 2 * num_layers * (4 * width**2 + 3 * width * config.swiglu_width)
    attention = 4 * num_layers * 20**2 * width  # the counter knows SDPA on some processors only
    assert counter.get_total_flops() - 20 * per_token in (0, attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernels", ["plain", "torch", "onednn", "packed"])
@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_a_product_is_exact_to_the_dtype(dtype, bias, kernels, num_rows):
    layer = nn.Linear(96, 40, bias=bias).to(dtype).eval()
    weights = [parameter.double() for parameter in layer.parameters()]
    if kernels in ("onednn", "packed"):
        needs_onednn(dtype)
    if kernels == "packed":
        layer = InferenceLinear(layer, dtype)
    x = torch.randn(num_rows, 96, dtype=dtype)
    wanted = F.linear(x.double(), *weights)
    # fp32: sums of 96 terms; bf16: the product is rounded
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    with torch.inference_mode():
        out = linear(layer, x, MULTIPLY[kernels])
    assert out.shape == wanted.shape and out.dtype == dtype
    assert num_rows == 0 or largest_error(out, wanted) < tolerance


@pytest.mark.parametrize("kernels", ["torch", "onednn"])
def test_a_weight_of_another_tensor_type_uses_its_own_operation(kernels):
    """As the quantized weights of torchao, which do not support the operators of oneDNN."""

    class Halved(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            if function is F.linear:
                x, weight, bias = arguments
                return F.linear(x, weight.as_subclass(torch.Tensor) / 2, bias)
            return super().__torch_function__(function, types, arguments, options or {})

    layer, x = nn.Linear(8, 8, bias=False).eval(), torch.randn(3, 8)
    with torch.inference_mode():
        wanted = layer(x) / 2
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Halved))
    with torch.inference_mode():
        torch.testing.assert_close(linear(layer, x, MULTIPLY[kernels]), wanted)


@pytest.mark.slow
def test_products_of_onednn_have_few_numbers_of_rows(monkeypatch):
    """oneDNN keeps a program of 0.5 MB for each number of rows, and the batches of a service have all of them."""
    asked = []

    def product(x, weight, bias, *_):
        asked.append(len(x))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(machine_neobert.TORCH, "onednn_linear", product)
    layer = nn.Linear(8, 3).eval()
    with torch.no_grad():
        for rows in range(1, 4097):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(linear(layer, x, multiply_by_onednn), F.linear(x, layer.weight, layer.bias))
            assert rows <= asked[-1] <= rows * 17 / 16
    assert len(set(asked)) == 64 + 16 * 6  # each up to 64, then 16 to each power of two


def test_a_forward_under_another_default_dtype_changes_no_later_result(tiny_config):
    """Nothing that is made in a forward and kept may take its dtype from torch's default."""
    ids = torch.randint(5, 90, (2, 70))
    for int8 in (False, True):
        copied = neobert_hf.inference_copy(NeoBERTModel(tiny_config).eval(), int8=int8)
        kernels_neobert._scalar.cache_clear()
        with torch.inference_mode():
            wanted = copied(ids).last_hidden_state
            kernels_neobert._scalar.cache_clear()
            try:
                torch.set_default_dtype(BFLOAT16)
                assert torch.equal(copied(ids).last_hidden_state, wanted)
            finally:
                torch.set_default_dtype(torch.float32)
            assert torch.equal(copied(ids).last_hidden_state, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 519])
def test_norm_is_rounded_once(dtype, num_tokens):
    norm = RMSNorm(48, eps=1e-5).to(dtype).eval()
    nn.init.normal_(norm.weight)
    x = (torch.randn(num_tokens, 48) * torch.logspace(-3, 3, num_tokens)[:, None]).to(dtype)
    x[0] = 0
    before, wide = x.clone(), x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    with torch.no_grad():
        actual = rms_norm(x, norm)
        assert torch.equal(normalize(norm, x, True), actual) and torch.equal(normalize(norm, x, False), norm(x))
    assert actual.dtype == dtype and torch.equal(x, before)
    # half a unit in the last place of bf16, and fp32 arithmetic before it
    times = 4 if dtype == torch.float32 else 0.5
    allowed = times * torch.finfo(dtype).eps * wanted.abs() * 1.01
    assert ((actual.double() - wanted).abs() <= allowed).all()


def attend_in_float64(q, k, v, lengths):
    """One sequence and one head at a time, from the definition."""
    outputs = []
    for q_n, k_n, v_n in zip(*(x.double().split(lengths) for x in (q, k, v))):
        heads = [(q_n[:, h] @ k_n[:, h].T / math.sqrt(q.shape[-1])).softmax(-1) @ v_n[:, h] for h in range(q.shape[1])]
        outputs.append(torch.stack(heads, 1))
    return torch.cat(outputs)


LENGTHS = {
    "one token": (1,),
    "below the shortest": (5, 63, 2),
    "around a block of rows": (255, 256, 257),
    "one length": (96,) * 5,
    "several blocks": (700, 1300),
}


@pytest.fixture(params=[False, True], ids=["tiles", "SDPA"])
def with_amx(request, monkeypatch):
    """As on a processor without AMX, and as on one with it; here SDPA then runs without its instructions."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(machine_neobert.TORCH, "has_amx", lambda: request.param)
    return request.param


def test_amx_computes_attention_in_one_call_of_sdpa_for_equal_lengths(with_amx, monkeypatch):
    calls, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args: calls.append(args) or sdpa(*args))
    q = k = v = torch.randn(3 * 512, 2, 16).bfloat16()
    kernels_neobert.tiled_attention(q, k, v, (512,) * 3)
    assert len(calls) == with_amx
    assert all(x.dtype == BFLOAT16 and x.shape == (2, 3, 512, 16) for args in calls for x in args)


@pytest.mark.usefixtures("with_amx")
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["flat", "peaked"])
def test_tiled_attention_equals_softmax_attention(name, scale):
    lengths = LENGTHS[name]
    q, k, v = (torch.randn(sum(lengths), 3, 16).bfloat16() for _ in range(3))
    q = q * scale
    wanted = attend_in_float64(q, k, v, lengths)
    actual = kernels_neobert.tiled_attention(q, k, v, lengths)
    # To first order: a score s that is rounded to bf16 changes its weight by the factor e^(u s), u the unit roundoff; the
    # weight, the mixed values, the sum of the weights and the quotient are rounded once each.
    unit_roundoff = torch.finfo(BFLOAT16).eps / 2
    largest_scores = torch.cat(
        [
            torch.einsum("qhk,lhk->qhl", q_n, k_n).abs().amax(-1, keepdim=True) / math.sqrt(q.shape[-1])
            for q_n, k_n in zip(*(x.double().split(lengths) for x in (q, k)))
        ]
    )
    of_weights = torch.expm1(unit_roundoff * (largest_scores + 1))
    absolute_values = attend_in_float64(q, k, v.abs(), lengths)
    allowed = of_weights * (absolute_values + wanted.abs()) + 3 * unit_roundoff * wanted.abs()
    assert ((actual.double() - wanted).abs() <= allowed + 1e-6).all()


@pytest.mark.usefixtures("with_amx")
@pytest.mark.parametrize("shift", [-3000.0, -200.0, 200.0, 3000.0])
def test_scores_beyond_the_range_of_the_exponential_are_shifted(shift):
    """Only one head of one sequence is out of range; the others keep every bit."""
    length = SHORTEST_TILED
    q, k, v = (torch.randn(2 * length, 2, 16) for _ in range(3))
    plain_scores = [x.bfloat16() for x in (q, k, v)]
    q[:length, 1, 0], k[:length, 1, 0] = 4 * shift / abs(shift), abs(shift)  # adds `shift` to every score
    shifted_scores = [x.bfloat16() for x in (q, k, v)]
    lengths = (length, length)
    before = kernels_neobert.tiled_attention(*plain_scores, lengths)
    after = kernels_neobert.tiled_attention(*shifted_scores, lengths)
    assert torch.equal(before[:, 0], after[:, 0])
    assert torch.equal(before[length:], after[length:])
    wanted, actual = attend_in_float64(*shifted_scores, lengths)[:length, 1], after[:length, 1]
    assert actual.isfinite().all()
    assert actual.abs().max() <= shifted_scores[2].abs().max()  # a mean of values
    # keys and scores of the size of `shift` are rounded, and an error of a score becomes a factor of a weight
    rounding = 4 * abs(shift) * torch.finfo(BFLOAT16).eps
    assert rounding > 1 or largest_error(actual, wanted) < rounding
    shifted_scores[1][0, 1, 0] = torch.nan  # which stays in its sequence and its head
    with_nan = kernels_neobert.tiled_attention(*shifted_scores, lengths)
    assert with_nan[:length, 1].isnan().all() and torch.equal(with_nan[:, 0], before[:, 0])
    assert torch.equal(with_nan[length:], before[length:])


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6), seed=st.integers(0, 2**31), data=st.data())
def test_tiled_attention_never_mixes_sequences(lengths, seed, data):
    """Nor does NaN leave its sequence."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), 2, 16, generator=generator).bfloat16() for _ in range(3))
    changed = data.draw(st.integers(0, len(lengths) - 1))
    start = sum(lengths[:changed])
    part = slice(start, start + lengths[changed])
    before = kernels_neobert.tiled_attention(q, k, v, tuple(lengths))
    others = torch.ones(len(q), dtype=torch.bool)
    others[part] = False
    for x in (q, k, v):
        x[part] = 100 * torch.randn(x[part].shape, generator=generator)
    after = kernels_neobert.tiled_attention(q, k, v, tuple(lengths))
    assert torch.equal(before[others], after[others])
    k[start, 0, 0] = torch.nan
    assert torch.equal(before[others], kernels_neobert.tiled_attention(q, k, v, tuple(lengths))[others])
