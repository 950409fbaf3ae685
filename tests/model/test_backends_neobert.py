"""The table of attention backends: the choice of "auto" for each GPU, and every backend against the oracle, with stand-ins.

A stand-in is a short PyTorch function with the name and the signature of a kernel. It computes correct results on the CPU. So
the call of the kernel, its arguments and the use of its results are tested; the kernel itself is not.
"""

import importlib.util
import inspect
import json
import math
import os
import socket
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import packed_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CONFIG, Oracle, random_weights, write_checkpoint
from stand_ins.xformers import ops as xformers_ops
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, modeling_flash_attention_utils
from transformers.integrations import hub_kernels
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_kernels_available, logging

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.model import attention_neobert, backends_neobert, plan_neobert
from neobert_hf.model.attention_neobert import attend_sdpa, to_device
from neobert_hf.model.backends_neobert import BACKENDS, Situation, choose_backend
from neobert_hf.model.machine_neobert import attention_devices, onednn_is_best

STAND_INS = Path(__file__).parents[1].joinpath("stand_ins")
CAPABILITIES = {0: (7, 5), 1: (8, 0), 2: (9, 0), 3: (10, 0)}  # Turing, Ampere, Hopper, Blackwell
TURING, AMPERE, HOPPER, BLACKWELL = (torch.device("cuda", index) for index in CAPABILITIES)
CPU, MPS = torch.device("cpu"), torch.device("mps")
FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def no_choice_yet():
    """Forget cached choices before a test and after it."""
    cached = attention_neobert.loading_error, attention_neobert.has_cached_kernel, backends_neobert._find_best_backend
    for function in cached:
        function.cache_clear()
    with mock.patch.dict(attention_neobert.cached_kernels, clear=True):
        yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def gpus(no_choice_yet, monkeypatch):
    """Simulate four GPUs of different generations, with every backend installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: CAPABILITIES[device.index])
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, backend._replace(is_installed=lambda: True))


@pytest.mark.parametrize(
    ("devices", "dtype", "head_dim", "best"),
    [
        (TURING, FLOAT16, 64, "xformers"),
        (TURING, BFLOAT16, 64, "sdpa"),  # it has no bf16 instructions
        (TURING, FLOAT32, 64, "xformers"),
        (AMPERE, FLOAT16, 64, "flash_attention_2"),
        (AMPERE, BFLOAT16, 64, "flash_attention_2"),
        (AMPERE, BFLOAT16, 60, "sdpa"),
        (AMPERE, BFLOAT16, 264, "sdpa"),
        (AMPERE, FLOAT32, 64, "xformers"),
        (HOPPER, BFLOAT16, 64, "flash_attention_3"),
        (HOPPER, FLOAT64, 64, "sdpa"),
        (BLACKWELL, BFLOAT16, 64, "flash_attention_2"),
        (BLACKWELL, FLOAT32, 64, "sdpa"),  # the fp32 kernels of xformers support GPUs up to Hopper
        ((HOPPER, AMPERE), FLOAT16, 64, "flash_attention_2"),  # runs on all of them
        ((AMPERE, HOPPER), FLOAT16, 64, "flash_attention_2"),
        ((HOPPER, TURING, AMPERE), FLOAT16, 64, "xformers"),
        ((AMPERE, CPU), BFLOAT16, 64, "sdpa"),  # a part of the blocks is offloaded
        (MPS, FLOAT16, 64, "sdpa"),
        (MPS, FLOAT32, 64, "sdpa"),
        (CPU, BFLOAT16, 64, "sdpa"),
    ],
    ids=str,
)
def test_auto_depends_on_devices_dtype_and_head_width(gpus, devices, dtype, head_dim, best):
    devices = devices if isinstance(devices, tuple) else (devices,)
    assert choose_backend("auto", Situation(devices, dtype, head_dim, is_packed=True)) == best
    assert choose_backend("auto", Situation(devices, dtype, head_dim, is_packed=False)) == "sdpa"


@pytest.mark.parametrize(
    ("name", "situation", "message"),
    [
        ("torch_varlen", (AMPERE, FLOAT32, 64, True), "supports float16 or bfloat16, not torch.float32"),
        ("torch_varlen", (TURING, FLOAT16, 64, True), "at least 8.0 for torch.float16, but cuda:0 has 7.5"),
        ("torch_varlen", (CPU, BFLOAT16, 64, True), "runs on CUDA, not on cpu"),
        ("torch_varlen", (AMPERE, BFLOAT16, 64, False), "supports packed sequences only"),
        ("flash_attention_2", (AMPERE, FLOAT32, 64, True), "supports float16 or bfloat16"),
        ("flash_attention_2", (MPS, BFLOAT16, 64, True), "not on mps"),
        ("flash_attention_2", (AMPERE, BFLOAT16, 20, True), "a multiple of 8 and at most 256, not 20"),
        ("flash_attention_3", (AMPERE, BFLOAT16, 64, True), "at least 9.0 for torch.bfloat16, but cuda:1 has 8.0"),
        ("flash_attention_3", (BLACKWELL, BFLOAT16, 64, True), "at most 9.9 for torch.bfloat16, but cuda:3 has 10.0"),
        ("flash_attention_4", (AMPERE, BFLOAT16, 64, True), "at least 9.0 for torch.bfloat16, but cuda:1 has 8.0"),
        ("kernels-community/flash-attn2", (AMPERE, FLOAT32, 64, True), "supports float16 or bfloat16"),
        ("xformers", (BLACKWELL, FLOAT32, 64, True), "at most 9.0 for torch.float32, but cuda:3 has 10.0"),
        ("xformers", (TURING, BFLOAT16, 64, True), "at least 8.0 for torch.bfloat16, but cuda:0 has 7.5"),
        ("flex_attention", (CPU, FLOAT32, 64, False), "supports packed sequences only"),
        ("cpu_tiled", (CPU, BFLOAT16, 64, True), "requires inference on a CPU with fast products in torch.bfloat16"),
        ("cpu_tiled", (CPU, FLOAT32, 64, True, True), "supports bfloat16, not torch.float32"),
        ("cpu_tiled", (AMPERE, FLOAT32, 64, True), "runs on CPU, not on cuda"),
    ],
)
def test_a_requested_backend_that_cannot_run_is_refused_with_reason_and_solution(gpus, name, situation, message):
    with pytest.raises(ValueError, match=f"attn_implementation='{name}' .*{message}.*; choose 'sdpa', or omit it"):
        choose_backend(name, Situation(situation[:1], *situation[1:]))


def test_auto_chooses_the_best_backend_for_this_machine(checkpoint):
    model = AutoModel.from_pretrained(checkpoint)
    assert model.config._attn_implementation == "auto"
    packed = Situation((CPU,), torch.bfloat16, 64, is_packed=True)
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
    AttentionInterface.register("my_sdpa", sdpa_attention_forward)
    AttentionMaskInterface.register("my_sdpa", sdpa_mask)
    packed = {"input_ids": expected["packed.input_ids"], "cu_seq_lens_q": expected["packed.cu_seq_lens"]}
    padded = {name: expected[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        wanted = [model(**inputs).logits for inputs in (packed, padded)]
        model.set_attn_implementation("my_sdpa")
        for inputs, logits in zip((packed, padded), wanted):
            torch.testing.assert_close(model(**inputs).logits, logits, rtol=1e-4, atol=1e-4)


MISSING = [name for name, row in BACKENDS.items() if row.remedy]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_backend_is_refused_with_the_installation_command(gpus, monkeypatch, name):
    monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(is_installed=lambda: False))
    with pytest.raises(ImportError, match=r"is not installed: .*(pip install|build it)"):
        choose_backend(name, Situation((AMPERE,), BFLOAT16, 64, is_packed=True))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("xformers", ImportError, "'xformers' is not installed: pip install 'xformers"),
        # transformers with `kernels` tries to download one, and has its own words
        ("flash_attention_2", ImportError, "toggled on" if is_kernels_available() else "is not installed: pip inst"),
        ("no_such_attention", ValueError, "no_such_attention"),
    ],
)
def test_a_backend_that_is_not_installed_is_refused_on_load(checkpoint, name, error, message):
    package = attention_neobert.KERNELS.get(name, "").partition(".")[0]
    if package and importlib.util.find_spec(package):
        pytest.skip("it is installed here")
    with pytest.raises(error, match=message):
        AutoModel.from_pretrained(checkpoint, attn_implementation=name)


# The import of xformers only warns.
DAMAGED = {
    "flash_attention_2": ("flash_attn", OSError("flash_attn_2_cuda.so: undefined symbol: _ZN3c105Error")),
    "flash_attention_3": ("flash_attn_interface", OSError("libcudart.so.12: cannot open shared object file")),
    "xformers": ("xformers", ImportError("its kernels are of another torch or CUDA")),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_package_that_was_built_for_another_torch_is_refused_if_named_and_passed_over_by_auto(
    name, tmp_path, no_choice_yet, monkeypatch, caplog
):
    package, error = DAMAGED[name]
    (tmp_path / package).mkdir()
    (tmp_path / package / "ops.py").touch()
    source = "_has_cpp_library = False" if name == "xformers" else f"raise {error!r}"
    (tmp_path / package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for version in (2, 3, 4):
        found = lambda version=version: name == f"flash_attention_{version}"  # noqa: E731
        monkeypatch.setattr(transformers.utils, f"is_flash_attn_{version}_available", found, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    best = "torch_varlen" if attention_neobert.has_varlen() else "sdpa"
    situation = Situation((HOPPER,), BFLOAT16, 64, is_packed=True)
    for head_dim in (64, 128):
        assert choose_backend("auto", situation._replace(head_dim=head_dim)) == best
    message = f"{name!r} is installed, but does not load beside torch {torch.__version__}: {error!r}; uninstall it"
    with pytest.raises(ImportError) as refused:
        choose_backend(name, situation)
    assert f"{message}, then: {BACKENDS[name].remedy}" in str(refused.value)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and message in warnings[0] and "'auto' uses another backend" in warnings[0]


def test_on_a_cpu_auto_imports_no_package_of_kernels(no_choice_yet, monkeypatch):
    """The import of xformers takes seconds and initialises CUDA, after which a process cannot fork."""
    monkeypatch.setattr(attention_neobert, "loading_error", lambda name: pytest.fail(name))
    for is_packed in (True, False):
        assert choose_backend("auto", Situation((CPU,), FLOAT32, 64, is_packed)) == "sdpa"


def test_a_named_backend_is_refused_before_the_first_block_if_one_gpu_cannot_run_it(gpus, model, monkeypatch):
    """Two GPUs stand for the devices of the blocks, which `device_map` has placed."""
    place = lambda device: SimpleNamespace(_hf_hook=None, parameters=lambda: iter([SimpleNamespace(device=device)]))  # noqa: E731
    devices = attention_devices([place(device) for device in (HOPPER, torch.device("meta"), TURING)], HOPPER)
    assert devices == (HOPPER, TURING) and attention_devices(model.model.transformer_encoder, CPU) == (CPU,)
    monkeypatch.setattr(plan_neobert, "attention_devices", lambda *_: devices)
    backend = BACKENDS["torch_varlen"]._replace(devices=("cpu", "cuda"), head_multiple=1)
    monkeypatch.setitem(BACKENDS, "torch_varlen", backend)
    model = model.half()
    model.set_attn_implementation("torch_varlen")
    model.model.transformer_encoder[0].register_forward_pre_hook(lambda *_: pytest.fail("a block runs"))
    with pytest.raises(ValueError, match=r"at least 8\.0 for torch\.float16, but cuda:0 has 7\.5"):
        model(torch.tensor([[5, 6, 7]]))


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory):
    """Two heads of width 16; kernels need multiples of 8."""
    config = {**CONFIG, "hidden_size": 32, "num_attention_heads": 2, "dim_head": 16}
    weights = random_weights(config=config)
    return Oracle(weights, config), write_checkpoint(tmp_path_factory.mktemp("wide"), weights, config=config)


LENGTHS = (9, 1, 16, 5, 9, 2)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(3)
    return [rng.integers(5, CONFIG["vocab_size"], length) for length in LENGTHS]


@pytest.fixture(scope="module")
def inputs(documents):
    """The documents packed with boundaries, and padded on the left."""
    longest = max(LENGTHS)
    padded = np.stack([np.pad(ids, (longest - len(ids), 0)) for ids in documents])
    boundaries = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    ids = torch.from_numpy(np.concatenate(documents))[None]
    return {
        "packed": {"input_ids": ids, "cu_seq_lens_q": boundaries, "max_length_q": longest},
        "padded": {"input_ids": torch.from_numpy(padded), "attention_mask": torch.from_numpy(padded != 0).long()},
    }


def run(model, inputs):
    """Concatenated logits of all documents, packed and padded, and the gradient of a weight before attention."""
    packed = model(**inputs["packed"], labels=inputs["packed"]["input_ids"])
    packed.loss.backward()
    with torch.no_grad():
        padded = model(**inputs["padded"]).logits[inputs["padded"]["attention_mask"].bool()]
    gradient = model.model.transformer_encoder[0].qkv.weight.grad.clone()
    return {"packed": packed.logits[0].detach(), "padded": padded, "gradient": gradient}


def check(actual, wide_checkpoint, documents, inputs):
    """Compare logits with the oracle, and the gradient with eager attention, which central differences confirm."""
    oracle, folder = wide_checkpoint
    wanted = torch.from_numpy(np.concatenate([oracle.mlm_logits(oracle.encode(ids)[2]) for ids in documents]))
    for form in ("packed", "padded"):
        assert (actual[form] - wanted).abs().max() < 1e-10, form
    eager = NeoBERTForMaskedLM.from_pretrained(folder, dtype=FLOAT64, attn_implementation="eager")
    assert (actual["gradient"] - run(eager, inputs)["gradient"]).abs().max() < 1e-10


def plain_varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """The result of a kernel for packed sequences, with its requirements on the arguments."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and type(max_q) is type(max_k) is int
    assert all(x.ndim == 3 and x.stride(-1) == 1 for x in (q, k, v))
    lengths = cu_seq_q.diff().tolist()
    assert max(lengths) <= max_q and sum(lengths) == len(q)
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)))
    return torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=1).transpose(0, 1)


def allow_on_cpu(monkeypatch, name, **changes):
    """Allow a backend on the CPU and in float64."""
    changes = dict(devices=("cpu",), capabilities={}, is_installed=lambda: True) | changes
    monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(**changes))


def test_torch_varlen_agrees_with_the_oracle(wide_checkpoint, documents, inputs, monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch 2.10")
    signature, calls = inspect.signature(varlen.varlen_attn), []

    def varlen_attn(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs).arguments
        calls.append(arguments)
        return plain_varlen(*list(arguments.values())[:7])

    monkeypatch.setattr(attention_neobert, "varlen_attn", varlen_attn)
    allow_on_cpu(monkeypatch, "torch_varlen")
    options = {"dtype": FLOAT64, "attn_implementation": "torch_varlen"}
    model = NeoBERTForMaskedLM.from_pretrained(wide_checkpoint[1], **options).eval()
    check(run(model, inputs), wide_checkpoint, documents, inputs)
    assert len(calls) == 2 * model.config.num_hidden_layers
    assert all(list(call) == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"] for call in calls)


def test_xformers_agrees_with_the_oracle(wide_checkpoint, documents, inputs, monkeypatch):
    monkeypatch.setattr(attention_neobert, "find_xformers", lambda: xformers_ops)
    allow_on_cpu(monkeypatch, "xformers")
    model = NeoBERTForMaskedLM.from_pretrained(wide_checkpoint[1], dtype=FLOAT64, attn_implementation="xformers").eval()
    check(run(model, inputs), wide_checkpoint, documents, inputs)


def write_kernel(cache, version, name, code="", age=0):
    """A snapshot of a kernel in a cache of the Hub, with a build for the CPU: the stand-in of FlashAttention 2."""
    snapshot = cache / f"kernels--kernels-community--flash-attn{version}/snapshots/{name}"
    build = snapshot / "build/torch-cpu"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text((STAND_INS / "flash_attn/__init__.py").read_text() + code)
    metadata = {"id": f"stand_in_{name}", "name": f"flash-attn{version}", "version": 1, "license": "Apache-2.0"}
    (build / "metadata.json").write_text(json.dumps({**metadata, "python-depends": [], "backend": {"type": "cpu"}}))
    os.utime(snapshot, (1e9 - age, 1e9 - age))


def load_from_folder(snapshot):
    """What `kernels.get_local_kernel` does with the snapshots above."""
    spec = importlib.util.spec_from_file_location(snapshot.name, snapshot / "build/torch-cpu/__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub_cache(tmp_path, monkeypatch, no_choice_yet):
    """An empty cache of the Hub, and a Hub that nobody may ask."""
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    monkeypatch.setattr(backends_neobert, "has_flash_attention", lambda version: False)
    return tmp_path


@pytest.fixture
def kernels(monkeypatch):
    """A stand-in for the package `kernels`."""
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_local_kernel=load_from_folder))


RETURNS_TUPLE = """
function = flash_attn_varlen_func
def flash_attn_varlen_func(*args): return function(*args), None
"""


@pytest.mark.compat
@pytest.mark.parametrize(("version", "code"), [(2, ""), (3, RETURNS_TUPLE)], ids=["2", "3"])
@pytest.mark.parametrize("is_real", [False, True], ids=["stand-in for kernels", "package kernels"])
def test_auto_runs_a_kernel_from_the_cache_of_the_hub_and_downloads_nothing(
    hub_cache, wide_checkpoint, documents, inputs, monkeypatch, request, version, code, is_real
):
    if is_real:
        pytest.importorskip("kernels", minversion="0.16", reason="needs the package kernels 0.16")
    else:
        request.getfixturevalue("kernels")
    name = f"flash_attention_{version}"
    write_kernel(hub_cache, version, f"of_{name}_{is_real}", code)
    allow_on_cpu(monkeypatch, name, is_installed=BACKENDS[name].is_installed)
    model = NeoBERTForMaskedLM.from_pretrained(wide_checkpoint[1], dtype=FLOAT64).eval()
    check(run(model, inputs), wide_checkpoint, documents, inputs)
    kernel = attention_neobert.cached_kernels[name]
    assert kernel.__globals__["num_calls"] == 2 * model.config.num_hidden_layers


def test_a_cached_kernel_that_does_not_load_is_passed_over_with_a_warning(hub_cache, kernels, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    situation = Situation((HOPPER,), BFLOAT16, 64, is_packed=True)
    write_kernel(hub_cache, 3, "newer", "raise OSError('undefined symbol')")
    write_kernel(hub_cache, 2, "older", age=1)
    write_kernel(hub_cache, 2, "newest", "raise OSError('undefined symbol')")
    assert choose_backend("auto", situation) == choose_backend("flash_attention_2", situation) == "flash_attention_2"
    with pytest.raises(ImportError, match="'flash_attention_3' is not installed: pip install kernels"):
        choose_backend("flash_attention_3", situation)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [each.partition(" in ")[0][-19:] for each in warnings] == ["'flash_attention_3'", "'flash_attention_2'"]
    assert all("does not load: OSError('undefined symbol')" in each for each in warnings)


def test_a_cached_kernel_without_the_package_kernels_is_named_in_a_warning(hub_cache, monkeypatch, caplog):
    write_kernel(hub_cache, 3, "newest")
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert not BACKENDS["flash_attention_3"].is_installed() and not BACKENDS["flash_attention_2"].is_installed()
    assert "'flash_attention_3' in" in caplog.text and "import of kernels halted" in caplog.text


@pytest.mark.compat
def test_a_named_kernel_of_the_hub_is_called_by_transformers(hub_cache, wide_checkpoint, inputs, monkeypatch):
    name, asked = "kernels-community/flash-attn3", []
    write_kernel(hub_cache, 3, "named")
    kernel = load_from_folder(next(hub_cache.glob("*/snapshots/*")))
    for available, value in {"is_kernels_available": lambda: True, "_kernels_available": True}.items():
        monkeypatch.setattr(hub_kernels, available, value, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: asked.append(name) or kernel, raising=False)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None, raising=False)
    load = partial(NeoBERTForMaskedLM.from_pretrained, wide_checkpoint[1], dtype=BFLOAT16)
    with mock.patch.dict(AttentionInterface._global_mapping), mock.patch.dict(AttentionMaskInterface._global_mapping):
        actual = run(load(attn_implementation=name).eval(), inputs)
    wanted = run(load(attn_implementation="sdpa").eval(), inputs)
    assert set(asked) == {name} and kernel.num_calls
    for form in ("packed", "padded", "gradient"):
        torch.testing.assert_close(actual[form], wanted[form], rtol=0.05, atol=0.05)


def sdpa_of_group(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


GROUP_KERNELS = {"on a GPU": sdpa_of_group, "in training on a CPU": attention_neobert._attend_group}


@pytest.fixture(params=GROUP_KERNELS)
def grouped(monkeypatch, request):
    """SDPA in length groups, and the list of its calls."""
    calls = []
    kernel = GROUP_KERNELS[request.param]
    in_groups = BACKENDS["sdpa"]._replace(make_mask=lambda layout, *_: attention_neobert.group_by_length(layout))
    monkeypatch.setitem(BACKENDS, "sdpa", in_groups)
    monkeypatch.setattr(attention_neobert, "_attend_group", lambda *a: calls.append(1) or kernel(*a))
    return calls


def test_grouped_sdpa_agrees_with_the_oracle(grouped, wide_checkpoint, documents, inputs):
    model = NeoBERTForMaskedLM.from_pretrained(wide_checkpoint[1], dtype=FLOAT64, attn_implementation="sdpa").eval()
    check(run(model, inputs), wide_checkpoint, documents, inputs)


def test_grouped_sdpa_makes_few_calls_for_many_sequences(grouped):
    lengths = torch.randint(1, 513, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    q, k, v = torch.randn(3, sum(lengths), 2, 8)
    plan = packed_plan(lengths, "sdpa")
    attend_sdpa(q, k, v, plan)
    assert 1 <= len(grouped) <= 1 + math.log2(512)
    assert sum(count * length for count, length in plan.mask.shapes) < 2 * sum(lengths)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", GROUP_KERNELS)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_grouped_sdpa_equals_sdpa_and_never_sees_other_documents(kernel, lengths, data):
    """Values and gradients equal those of one call per sequence; a change in a sequence changes no bit of the others."""
    generator = torch.Generator().manual_seed(sum(lengths))
    inputs = [torch.randn(sum(lengths), 2, 8, dtype=FLOAT64, generator=generator) for _ in range(3)]
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    plan = packed_plan(lengths, "sdpa")
    results = []
    for mask in (None, attention_neobert.group_by_length(plan.layout)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with mock.patch.object(attention_neobert, "_attend_group", GROUP_KERNELS[kernel]):
            output, _ = attend_sdpa(*leaves, plan._replace(mask=mask))
        output.cos().sum().backward()
        results.append((output.detach(), *(leaf.grad for leaf in leaves)))
    for alone, grouped in zip(*results):
        assert (alone - grouped).abs().max() < 1e-12
    changed = data.draw(st.integers(0, len(lengths) - 1))
    at = slice(boundaries[changed], boundaries[changed + 1])
    for x in inputs:
        x[at] += 1
    with mock.patch.object(attention_neobert, "_attend_group", GROUP_KERNELS[kernel]):
        other, _ = attend_sdpa(*inputs, plan._replace(mask=mask))
    elsewhere = torch.ones(sum(lengths), dtype=torch.bool)
    elsewhere[at] = False
    assert torch.equal(other[elsewhere], results[1][0][elsewhere])


def test_training_on_a_cpu_has_the_gradients_of_its_formula():
    """The written backward pass against numerical differences, with padded keys and without."""
    inputs = [torch.randn(3, 2, 5, 4, dtype=FLOAT64, requires_grad=True) for _ in range(3)]
    mask = torch.arange(5) < torch.tensor([5, 1, 3])[:, None]
    for each in (None, mask[:, None, None]):
        assert torch.autograd.gradcheck(attention_neobert._BatchedProducts.apply, (*inputs, each))


@pytest.mark.parametrize(
    ("dtype", "length", "is_training", "is_grouped"),
    [
        *((torch.bfloat16, 128, True, True), (torch.bfloat16, 128, False, False), (torch.bfloat16, 2048, True, False)),
        *((torch.float32, 20, True, True), (torch.float32, 128, True, False), (FLOAT64, 20, True, False)),
    ],
)
def test_a_cpu_groups_sequences_where_that_is_faster(dtype, length, is_training, is_grouped):
    plan = packed_plan([length, length], "sdpa", dtype, is_training)
    assert (plan.mask is not None) == is_grouped


@pytest.mark.parametrize("uses_bf16", [True, False])
def test_a_forward_in_training_mode_gives_the_same_bits_with_and_without_gradients(checkpoint, uses_bf16):
    """Gradient caching embeds a batch without gradients, and again with gradients."""
    model = NeoBERTForMaskedLM.from_pretrained(checkpoint).train()
    mask = (torch.arange(24) < torch.tensor([24, 3, 9, 17])[:, None]).long()
    ids, states = torch.randint(5, 96, mask.shape), []
    for has_gradients in (False, True):
        with torch.set_grad_enabled(has_gradients), torch.autocast("cpu", torch.bfloat16, uses_bf16):
            states.append(model.model(ids, attention_mask=mask).last_hidden_state)
    assert states[1].requires_grad and torch.equal(*states)


def test_the_page_on_loading_states_where_every_backend_was_tested():
    root = Path(__file__).parents[2]
    section = (root / "docs/loading.md").read_text("utf-8").partition("## Attention backends")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    kinds = ("cpu", "cuda", "mps", "xpu")
    words = {(row[0].strip("`"), device): word for row in rows for device, word in zip(kinds, row[2:])}
    assert {name for name, _ in words} == set(BACKENDS)
    for (name, device), word in words.items():
        assert bool(word) == (not BACKENDS[name].devices or device in BACKENDS[name].devices), (name, device)
    files = (root / f"benchmarks/results/{name}.json" for name in ("gpu_report", "rehearsal"))
    on_gpu, rehearsal = (json.loads(file.read_text()) for file in files)
    measured = {(row["backend"], "cuda") for row in on_gpu["errors"]} - {("auto", "cuda")}
    assert measured == {cell for cell, word in words.items() if word == "measured" and cell[1] != "cpu"}
    rehearsed = {(row["backend"], row["device"]): row["word"] for row in rehearsal["rows"]}
    for word in ("rehearsed", "simulated"):
        found = {cell for cell, stated in words.items() if stated == word}
        assert found == {cell for cell, stated in rehearsed.items() if stated == word} - measured
    assert "rehearsal.md" in section  # benchmarks/tests/test_benchmarks.py compares it with the JSON


class Host:
    """Stands for a CPU tensor and records how it is copied."""

    def __init__(self, is_pinned=False):
        self.is_pinned = is_pinned

    def pin_memory(self):
        return Host(is_pinned=True)

    def to(self, device, non_blocking=False):
        return device.type, non_blocking, self.is_pinned


def test_only_copies_to_cuda_are_asynchronous_and_they_start_from_pinned_memory():
    assert to_device(Host(), AMPERE) == ("cuda", True, True)
    assert to_device(Host(), MPS) == ("mps", False, False)
    assert to_device(Host(), CPU) == ("cpu", False, False)
