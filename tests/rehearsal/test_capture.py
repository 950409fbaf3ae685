"""A forward of an inference copy in a CUDA graph, without a GPU: fake tensors (fake_devices.py) and a recorder of operations."""

import pytest
import torch
from fake_devices import DeviceTensor, FakeDevice, move
from stand_ins import cuda_graphs
from test_fake_devices import HOPPER, SHAPE

import neobert_hf
from neobert_hf.model import gpu_neobert
from neobert_hf.model.gpu_neobert import make_compiled

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs the CUDA build of torch: make rehearse-gpu"),
]
BFLOAT16 = 3 * 2**-7  # of the largest value: three times the spacing


@pytest.fixture
def graphs(monkeypatch):
    """All CUDA graphs of the test. Regions are not compiled: Triton cannot run on fake tensors."""
    graphs = cuda_graphs.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", cuda_graphs.is_recording)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    # fake, so intercepted
    monkeypatch.setattr(gpu_neobert, "is_inference", lambda x, module: not torch.is_grad_enabled())
    monkeypatch.setattr(gpu_neobert, "runs_in_regions", lambda block: True)
    monkeypatch.setattr(gpu_neobert, "compiled_regions", lambda: (gpu_neobert.project, gpu_neobert.finish))
    return graphs


REFUSALS = {
    "int8 on a GPU": (dict(int8=True), HOPPER, "has no int8 products for cuda:0 on this machine; omit int8=True"),
    "bfloat16 on a T4": ({}, (7, 5), "no instructions for bfloat16; load the model with dtype=torch.float16"),
    # fake weights are another class than parameters, as those of a quantized model are
    "quantized weights": ({}, HOPPER, "can be compiled, because all have hooks, adapters or quantized weights; merge"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_gpu_cannot_run_fast_is_refused_with_the_way_out(graphs, monkeypatch, name):
    options, capability, message = REFUSALS[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    model = neobert_hf.NeoBERTModel._from_config(neobert_hf.NeoBERTConfig(**SHAPE), dtype=torch.bfloat16).eval()
    with FakeDevice("cuda:0"), pytest.raises(ValueError, match=message):
        neobert_hf.inference_copy(move(model, "cuda:0"), **options)


def on_both(lengths, seed):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 50, mask.shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": mask}


def test_a_capture_reads_nothing_from_the_host_and_replays_give_the_values_of_the_cpu(graphs):
    """One wait a forward, for the check of its values; two of the batches share a size."""
    config = neobert_hf.NeoBERTConfig(**SHAPE)
    on_cpu = neobert_hf.NeoBERTForMaskedLM._from_config(config, dtype=torch.bfloat16).eval()
    batches = [on_both(lengths, seed) for seed, lengths in enumerate([(7, 3, 6), (16,), (9, 9, 1), (60, 40), [64] * 3])]
    with torch.no_grad():
        wanted = [on_cpu(**batch).logits for batch in batches]
    with torch.no_grad(), FakeDevice("cuda:0") as device:
        model = move(on_cpu, "cuda:0")
        model.set_attn_implementation("torch_varlen")
        make_compiled(model.model, cuda_graphs=True)
        for batch, logits in zip(batches, wanted):
            inputs = {name: x.to("cuda:0") for name, x in batch.items()}
            model(**inputs)  # captures
            device.waits.clear()
            found = model(**inputs).logits
            assert len(device.waits) == 1
            assert type(found) is DeviceTensor and found.device == device.device
            assert (found.twin - logits).abs().max() <= BFLOAT16 * logits.abs().max()
    assert len(graphs) == 4 and sum(graph.num_replays for graph in graphs) == 10
    for graph in graphs:
        on_host = [operator for operator, args, _, _ in graph.operations if any(type(x) is torch.Tensor for x in args)]
        assert not on_host, on_host


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_forward_in_a_capture_of_the_caller_captures_no_other_graph(graphs, is_packed):
    """Padded rows, and a packed row with trusted boundaries."""
    model = neobert_hf.NeoBERTModel._from_config(neobert_hf.NeoBERTConfig(**SHAPE), dtype=torch.bfloat16).eval()
    inputs = on_both((7, 3), 0)
    if is_packed:
        row = inputs["input_ids"][inputs["attention_mask"].bool()][None]
        boundaries = torch.tensor([0, 7, 10], dtype=torch.int32)
        inputs = {"input_ids": row, "cu_seq_lens_q": boundaries, "max_length_q": 7, "trust_boundaries": True}
    with torch.no_grad():
        wanted = model(**inputs).last_hidden_state
    with torch.no_grad(), FakeDevice("cuda:0") as device:
        model = move(model, "cuda:0")
        make_compiled(model, cuda_graphs=True)
        inputs = {name: x.to("cuda:0") if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        device.waits.clear()
        of_caller = cuda_graphs.CUDAGraph()
        options = dict(pool=(0, 1), stream=cuda_graphs.Stream("cuda:0"), capture_error_mode="thread_local")
        with cuda_graphs.capture(of_caller, **options):
            states = model(**inputs).last_hidden_state
    assert not device.waits and not graphs and of_caller.operations
    assert (states.twin - wanted).abs().max() <= BFLOAT16 * wanted.abs().max()
