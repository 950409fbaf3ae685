"""An inference copy on a GPU: compiled regions, and CUDA graphs, with values on the CPU in place of the GPU.

What needs the rules of a GPU or its code is in tests/rehearsal; what needs the GPU itself is in tests/test_gpu.py.
"""

import threading
import weakref
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from stand_ins import cuda_graphs
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from neobert_hf import NeoBERTForSequenceClassification, NeoBERTModel, inference_copy
from neobert_hf.model import backends_neobert, gpu_neobert, kernels_neobert
from neobert_hf.model.gpu_neobert import LONGEST_CAPTURED, CompiledBlock, fill, make_compiled

FLOAT32 = dict(rtol=1e-5, atol=1e-5)  # the order of sums


@pytest.fixture
def graphs(monkeypatch):
    """All CUDA graphs of the test; regions are not compiled."""
    monkeypatch.setitem(backends_neobert.BACKENDS, "torch_varlen", cuda_graphs.VARLEN)
    monkeypatch.setattr(kernels_neobert, "onednn_is_best", lambda *args, **kwargs: False)
    # the recorder is a mode that sees every operation, and a real capture is none
    monkeypatch.setattr(kernels_neobert.TORCH, "num_dispatch_modes", lambda: 0)
    monkeypatch.setattr(gpu_neobert, "compiled_regions", lambda: (gpu_neobert.project, gpu_neobert.finish))
    return cuda_graphs.install(monkeypatch)


def gpu_copy(model, backend="torch_varlen"):
    """`inference_copy(model, cuda_graphs=True)` as it is on CUDA."""
    copied = inference_copy(model)
    copied.set_attn_implementation(backend)
    make_compiled(copied.base_model, cuda_graphs=True)
    return copied


def ragged(seed, num_rows, length, vocab_size=90):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (num_rows,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": torch.randint(5, vocab_size, mask.shape, generator=generator), "attention_mask": mask}


def num_replays(graphs):
    return sum(graph.num_replays for graph in graphs)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=70))
def test_documents_of_padding_fill_a_graph(lengths):
    """Up to a power of two of documents, each of one token or more; then with at most a quarter of the tokens, or 64."""
    filled, longest = fill(tuple(lengths))
    assert list(filled[: len(lengths)]) == lengths and min(filled) >= 1 and max(filled) <= longest
    assert len(filled) & (len(filled) - 1) == 0
    needed = sum(lengths) + len(filled) - len(lengths)
    assert needed <= sum(filled) <= max(needed * 1.25, needed + 64)


def test_any_batches_need_few_graphs():
    """28 for one text of any length, below 100 for 3,000 random batches of up to 32 texts."""
    texts = [(length,) for length in range(1, LONGEST_CAPTURED)]
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 33, (3000,), generator=generator).tolist()
    batches = [tuple(torch.randint(8, 129, (size,), generator=generator).tolist()) for size in sizes]
    for many, limit in ((texts, 28), (batches, 100)):
        assert len({(sum(filled), len(filled), longest) for filled, longest in map(fill, many)}) <= limit


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_ragged_batches_replay_graphs_with_the_logits_of_the_model(graphs, model, mode):
    """Of another size, of the same size again, padded on the left, and packed; each size is captured once."""
    copied, sizes = gpu_copy(model), set()
    with mode():
        for seed in range(12):
            batch = ragged(seed, *[(4, 32), (3, 57), (1, 16), (8, 20)][seed % 4])
            if seed % 3 == 0:
                batch = {name: x.flip(1) for name, x in batch.items()}
            if seed % 5 == 0:
                lengths = batch["attention_mask"].sum(1)
                ids = batch["input_ids"][batch["attention_mask"].bool()][None]
                batch = {"input_ids": ids, "cu_seq_lens_q": F.pad(lengths.cumsum(0), (1, 0)).int()}
            torch.testing.assert_close(copied(**batch).logits, model(**batch).logits, **FLOAT32)
            sizes |= set(copied.model.run_blocks.graphs)
    assert num_replays(graphs) == 12 and len(graphs) == len(sizes) < 12


def test_the_documents_that_fill_a_graph_change_nothing(graphs, model, expected):
    """The oracle's batch, after a batch of other tokens in the same graph."""
    copied, mask = gpu_copy(model), expected["attention_mask"]
    with torch.no_grad():
        copied(torch.full_like(mask, 7), attention_mask=mask)
        logits = copied(expected["input_ids"], attention_mask=mask).logits
    error = (logits - expected["mlm_logits"])[mask.bool()].abs().max()
    assert [graph.num_replays for graph in graphs] == [2]
    assert error <= 1e-5 * expected["mlm_logits"].nan_to_num().abs().max()


def test_positions_that_are_given_reach_the_graph(graphs, model):
    copied, batch = gpu_copy(model), ragged(0, 1, 20)
    with torch.no_grad():
        for shift in (0, 5):
            batch |= {"position_ids": torch.arange(20)[None] * 2 + shift}
            torch.testing.assert_close(copied(**batch).logits, model(**batch).logits, **FLOAT32)
    assert num_replays(graphs) == 2


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_classifier_reads_the_tokens_of_its_documents_only(graphs, tiny_config, pooling):
    tiny_config.classifier_pooling = pooling
    model = NeoBERTForSequenceClassification(tiny_config).eval()
    copied, batch = gpu_copy(model), ragged(3, 5, 13)
    with torch.inference_mode():
        torch.testing.assert_close(copied(**batch).logits, model(**batch).logits, **FLOAT32)
    assert num_replays(graphs) == 1


def _change_in_place(model):
    model.transformer_encoder[0].qkv.weight.mul_(2)
    model.layer_norm.weight.add_(0.5)


def _set_rotary(model):
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def _set_context(model):
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model.config.max_position_embeddings = 4


def _double(model):
    return {name: 2 * x for name, x in model.state_dict().items() if not x.is_mkldnn}


def _replace_norm(model):
    model.layer_norm.weight = torch.nn.Parameter(torch.full((32,), 3.0))


def _replace_data(model):
    model.encoder.weight.data = model.encoder.weight.data * 2


IN_PLACE = "weights in place"
CHANGED = {
    IN_PLACE: _change_in_place,
    "rotary positions": _set_rotary,
    "context of dynamic NTK": _set_context,
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(_double(model), assign=True),
    "a parameter": _replace_norm,
    "the data of a parameter": _replace_data,
    "embeddings": lambda model: model.resize_token_embeddings(120),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_in_place_reaches_the_graphs_and_what_is_replaced_is_captured_anew(graphs, tiny_config, name):
    model, batch = NeoBERTModel(tiny_config).eval(), ragged(0, 2, 9)
    copied = gpu_copy(model)
    with torch.no_grad():
        copied(**batch)
        for each in (model, copied):
            torch.manual_seed(0)
            CHANGED[name](each)
        wanted = model(**batch).last_hidden_state
        for _ in range(2):
            torch.testing.assert_close(copied(**batch).last_hidden_state, wanted, **FLOAT32)
    assert graphs[0].num_replays == (3 if name == IN_PLACE else 1) and len(graphs) <= (1 if name == IN_PLACE else 2)


def test_weights_of_a_functional_call_are_those_of_the_call(graphs, tiny_config):
    model, batch = NeoBERTModel(tiny_config).eval(), ragged(0, 2, 9)
    copied, other = gpu_copy(model), {"layer_norm.weight": torch.full((32,), 3.0)}
    with torch.no_grad():
        for weights in ({}, other, {}):
            found, wanted = (torch.func.functional_call(each, weights, (), batch) for each in (copied, model))
            torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, **FLOAT32)


def test_a_deleted_copy_frees_its_weights(graphs, tiny_config):
    copied = gpu_copy(NeoBERTModel(tiny_config))
    with torch.no_grad():
        copied(**ragged(0, 2, 9))
    weight = weakref.ref(copied.encoder.weight)
    del copied
    graphs.clear()
    assert weight() is None


def test_many_short_texts_that_padding_would_double_run_without_a_graph(graphs, model):
    batch = {"input_ids": torch.full((512, 2), 7)}
    with torch.no_grad():
        torch.testing.assert_close(gpu_copy(model)(**batch).logits, model(**batch).logits, **FLOAT32)
    assert not graphs


def test_results_keep_their_values_when_the_graph_runs_again(graphs, model, monkeypatch):
    """It runs after the end of the last one, which another thread may have started on its own stream."""
    recorded, waited = [], []
    monkeypatch.setattr(cuda_graphs.Stream, "record_event", lambda stream: recorded.append(object()) or recorded[-1])
    monkeypatch.setattr(cuda_graphs.Stream, "wait_event", lambda stream, event: waited.append(event))
    copied, batch = gpu_copy(model).model, ragged(0, 1, 30)
    with torch.inference_mode():
        first = copied(**batch).last_hidden_state
        kept = first.clone()
        copied(**ragged(1, 1, 30))
    assert num_replays(graphs) == 2 and torch.equal(first, kept)
    assert waited == recorded[:1] and len(recorded) == 2


def test_threads_share_the_graphs_of_two_copies_and_capture_one_at_a_time(graphs, model):
    """The stand-in of a capture refuses a second one."""
    copies, batches = [gpu_copy(model) for _ in range(2)], [ragged(seed, 2, 15 + seed) for seed in range(8)]
    found = {}

    def work(thread):
        with torch.inference_mode():
            for _ in range(5):
                for number, batch in enumerate(batches):
                    found[thread, number] = copies[thread % 2](**batch).logits

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (_, number), logits in found.items():
        torch.testing.assert_close(logits, model(**batches[number]).logits, **FLOAT32)
    assert len(found) == 32 and num_replays(graphs) == 4 * 5 * 8


def _hook(model, place):
    model.get_submodule(place).register_forward_hook(lambda module, args, output: 2 * output)


def _hook_attention(model):
    attention = model.model.transformer_encoder[0].attention
    attention.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))


def _adapt(model):
    torch.manual_seed(0)
    get_peft_model(model, LoraConfig(target_modules=["encoder"], init_lora_weights=False)).eval()


# What runs without a graph: a change of the model, or other inputs.
CHANGES = {
    "a hook on a linear layer": lambda model: _hook(model, "model.transformer_encoder.1.wo"),
    "a hook on a norm": lambda model: _hook(model, "model.layer_norm"),
    "a hook on attention": _hook_attention,
    "an adapter": _adapt,
    "SDPA": lambda model: model.set_attn_implementation("sdpa"),
}
INPUTS = {
    "hidden states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "embeddings": {"input_ids": None, "inputs_embeds": torch.randn(2, 9, 32)},
    "too many tokens": {"input_ids": torch.full((1, 128), 7), "attention_mask": None},
    "trusted boundaries": {
        **{"input_ids": torch.full((1, 9), 7), "attention_mask": None, "max_length_q": 5, "trust_boundaries": True},
        "cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32),
    },
}


@pytest.mark.parametrize("name", [*CHANGES, *INPUTS])
def test_what_a_graph_cannot_compute_runs_without_it(graphs, model, name, monkeypatch):
    """The graph of the same size is there, and does not run; the model, changed in the same way, has the same logits."""
    monkeypatch.setattr(gpu_neobert, "LONGEST_CAPTURED", 128)
    copied, batch = gpu_copy(model), ragged(0, 2, 9)
    with torch.no_grad():
        copied(**batch)
        assert num_replays(graphs) == 1
        for each in (copied, model):
            CHANGES.get(name, lambda model: None)(each)
        batch |= INPUTS.get(name, {})
        torch.testing.assert_close(copied(**batch).logits, model(**batch).logits, **FLOAT32)
    assert num_replays(graphs) == 1


def test_autograd_autocast_and_modes_run_without_a_graph(graphs, model, monkeypatch):
    copied, batch = gpu_copy(model), ragged(0, 2, 9)
    wanted = model(**batch).logits
    torch.testing.assert_close(copied(**batch).logits, wanted, **FLOAT32)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(copied(**batch).logits.float(), wanted, rtol=0.1, atol=0.1)
        monkeypatch.undo()
        with FlopCounterMode(display=False):
            assert not gpu_neobert.runs_compiled(copied.model.encoder.weight, copied.model)
    assert not graphs


def test_a_capture_that_fails_is_said_once_and_the_copy_goes_on(graphs, model, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "graph", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    streams = []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    copied = gpu_copy(model)
    with torch.no_grad():
        for seed in range(3):
            batch = ragged(seed, 2, 9 + 60 * seed)
            torch.testing.assert_close(copied(**batch).logits, model(**batch).logits, **FLOAT32)
    (line,) = [record.getMessage() for record in caplog.records if "gpu_neobert" in record.name]
    assert "CUDA out of memory. This inference copy goes on without graphs" in line and len(graphs) == len(streams) == 1


@pytest.mark.slow
def test_regions_are_two_graphs_of_the_compiler_for_all_blocks_and_batches(graphs, model, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    parts, options = (gpu_neobert.project, gpu_neobert.finish), {"dynamic": True, "fullgraph": True}
    regions = [torch.compile(part, backend=counter, **options) for part in parts]
    monkeypatch.setattr(gpu_neobert, "compiled_regions", lambda: regions)
    copied = gpu_copy(model)
    copied.model.run_blocks.is_on = False
    with torch.inference_mode():
        for seed in range(12):
            batch = ragged(seed, *[(4, 32), (3, 57), (8, 60), (1, 16), (1, 64), (16, 40)][seed % 6])
            torch.testing.assert_close(copied(**batch).logits, model(**batch).logits, **FLOAT32)
    assert counter.frame_count == 2


def test_a_copy_has_compiled_blocks_and_graphs_on_a_gpu_only(tiny_config):
    for has_graphs in (False, True):
        encoder = NeoBERTModel(tiny_config)
        make_compiled(encoder, has_graphs)
        assert {type(block) for block in encoder.transformer_encoder} == {CompiledBlock}
        assert ("run_blocks" in vars(encoder)) == has_graphs
    assert "run_blocks" not in vars(inference_copy(NeoBERTModel(tiny_config), cuda_graphs=True))  # on a CPU


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_regions_compute_a_block(model, dtype, graphs):
    """Against float64; half precision: at most 3 times the error of the block itself. A layer with a bias keeps it."""
    exact, batch, errors = model.model.double(), ragged(0, 2, 9), []
    exact.transformer_encoder[1].wo.bias = torch.nn.Parameter(torch.ones(exact.config.hidden_size).double())
    with torch.no_grad():
        wanted = exact(**batch).last_hidden_state
        for each in (exact.to(dtype), gpu_copy(exact.to(dtype))):
            errors.append((each(**batch).last_hidden_state.double() - wanted).abs().max() / wanted.abs().max())
    assert errors[1] <= max(3 * errors[0], 1e-13 if dtype == torch.float64 else 1e-5)


def test_a_graph_that_was_captured_in_inference_mode_runs_outside_of_it(graphs, model):
    copied, batch = gpu_copy(model), ragged(0, 2, 9)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(copied(**batch).logits, model(**batch).logits, **FLOAT32)
    assert [graph.num_replays for graph in graphs] == [2]
