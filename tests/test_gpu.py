"""Every installed attention backend on CUDA against the float64 oracle; writes benchmarks/results/gpu/CARD/report.json.

Run it with `make test-gpu`. It needs `pip install -e ".[train,embed]" pytest`; datatrove may be missing.
"""

import contextlib
import importlib.metadata
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from card import results_folder
from conftest import SENTENCE, packed_rows, relative_error
from oracle import CONFIG, Oracle, random_weights, write_checkpoint
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoModelForMaskedLM, set_seed

from neobert_hf import MINI_MODEL_PATH, NeoBERTConfig, NeoBERTForMaskedLM, PackedMLMCollator, best_dtype, inference_copy
from neobert_hf.checkpoints.embedding_models import open_embedding_model
from neobert_hf.model.backends_neobert import Situation, choose_backend, find_backend
from neobert_hf.pretraining.arguments import PretrainingArguments
from neobert_hf.pretraining.trainer import PretrainingTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; run make test-gpu on a machine with a GPU"),
]

FLOAT32, HALF = (torch.float32,), (torch.float16, torch.bfloat16)
BACKENDS = dict.fromkeys(("auto", "eager", "sdpa", "flex_attention", "xformers"), FLOAT32 + HALF)
BACKENDS |= dict.fromkeys(("torch_varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"), HALF)
CASES = [(backend, dtype) for backend, dtypes in BACKENDS.items() for dtype in dtypes]


def versions():
    names = ("torch", "transformers", "triton", "xformers", "flash-attn", "flash-attn-3", "flash-attn-4", "kernels")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


@pytest.fixture(scope="module")
def report():
    rows = []
    yield rows
    content = {"device": torch.cuda.get_device_name(), "versions": versions(), "errors": rows}
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(content, indent=2) + "\n")


def skip_emulated(dtype):
    """GPUs before Ampere emulate bf16, some kernels do not compile for it, and `best_dtype` is float16."""
    capability = torch.cuda.get_device_capability()
    if dtype == torch.bfloat16 and capability < (8, 0):
        pytest.skip(f"bfloat16 needs a GPU of capability 8.0; this one has {'.'.join(map(str, capability))}")


def load(folder, backend, dtype):
    skip_emulated(dtype)
    try:
        choose_backend(backend, Situation((torch.device("cuda", 0),), dtype, 64, is_packed=backend != "eager"))
    except (ImportError, ValueError) as error:
        pytest.skip(f"{backend} does not run here: {error}")
    return AutoModelForMaskedLM.from_pretrained(folder, attn_implementation=backend, dtype=dtype).cuda()


@pytest.fixture
def inputs(expected):
    """The packed row of the oracle, and the same documents padded, on the GPU."""
    ids, boundaries = expected["packed.input_ids"].cuda(), expected["packed.cu_seq_lens"].int().cuda()
    packed = {"input_ids": ids, "cu_seq_lens_q": boundaries}
    padded = {name: expected[name].cuda() for name in ("input_ids", "attention_mask")}
    return packed, padded


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory):
    """Two heads of width 64; kernels need at least 16."""
    config = {**CONFIG, "hidden_size": 128, "num_attention_heads": 2, "dim_head": 64, "intermediate_size": 384}
    weights = random_weights(config=config)
    return config, weights, write_checkpoint(tmp_path_factory.mktemp("wide"), weights, config=config)


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_every_backend_agrees_with_the_oracle_also_in_gradients(wide_checkpoint, inputs, backend, dtype, report):
    config, weights, folder = wide_checkpoint
    model = load(folder, backend, dtype)
    packed, padded = inputs
    oracle = Oracle(weights, config)
    bounds = packed["cu_seq_lens_q"].tolist()
    ids = packed["input_ids"][0].cpu().numpy()
    states = np.concatenate([oracle.encode(ids[a:b])[2] for a, b in itertools.pairwise(bounds)])
    wanted = torch.from_numpy(oracle.mlm_logits(states))

    # The reference error: eager attention in the same dtype, without fused operations.
    plain = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).cuda()
    floor = relative_error(plain(**packed).logits[0], wanted)
    error = relative_error(model(**packed).logits[0], wanted)
    real = padded["attention_mask"].bool()
    padded_error = relative_error(model(**padded).logits[real], wanted)
    allowed = 1e-4 if dtype == torch.float32 else 3 * floor
    row = {"backend": backend, "dtype": str(dtype).removeprefix("torch."), "plain_error": floor}
    report.append({**row, "packed_error": error, "padded_error": padded_error})
    assert error <= allowed and padded_error <= allowed

    exact = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    gradients = []
    for variant in (exact, plain, model):
        on_device = {name: value.to(variant.device) for name, value in packed.items()}
        variant(**on_device, labels=on_device["input_ids"]).loss.backward()
        gradients.append(variant.model.transformer_encoder[0].qkv.weight.grad.double().cpu())
    floor, error = (relative_error(gradient, gradients[0]) for gradient in gradients[1:])
    report[-1]["gradient_error"] = error
    assert error <= (1e-3 if dtype == torch.float32 else 3 * floor)


@contextlib.contextmanager
def sync_debug_mode(mode):
    """What torch does where the host waits for the GPU; the default again afterwards."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_from_the_first_block_on_the_host_never_waits_for_the_gpu(wide_checkpoint, inputs):
    """With synchronisation forbidden from the first block on, a forward still runs."""
    model = load(wide_checkpoint[2], "auto", best_dtype("cuda"))
    packed, _ = inputs
    model(**packed)  # the first call may synchronise to set up kernels
    blocks = model.model.transformer_encoder
    blocks[0].register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))
    with torch.no_grad(), sync_debug_mode("default"):
        model(**packed)


def test_with_trusted_boundaries_the_host_never_waits(wide_checkpoint, inputs):
    model = load(wide_checkpoint[2], "torch_varlen", torch.bfloat16)
    packed, _ = inputs
    packed["max_length_q"] = int(packed["cu_seq_lens_q"].diff().max())
    with torch.no_grad():
        wanted = model(**packed).logits
        with sync_debug_mode("error"):
            logits = model(**packed, trust_boundaries=True).logits
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("dtype", FLOAT32 + HALF, ids=lambda value: str(value).removeprefix("torch."))
def test_an_inference_copy_agrees_with_the_oracle_also_when_it_replays(wide_checkpoint, inputs, dtype, report):
    """Padded: two forwards of other tokens in between, which run the same CUDA graph if attention allows one."""
    config, weights, folder = wide_checkpoint
    model = load(folder, "auto", dtype)
    copied, padded = inference_copy(model), inputs[1]
    real = padded["attention_mask"].bool()
    documents = [row[mask].cpu().numpy() for row, mask in zip(padded["input_ids"], real)]
    oracle = Oracle(weights, config)
    wanted = torch.from_numpy(np.concatenate([oracle.mlm_logits(oracle.encode(ids)[2]) for ids in documents]))
    floor = relative_error(model(**padded).logits[real], wanted)
    errors = []
    with torch.inference_mode():
        for _ in range(2):
            errors.append(relative_error(copied(**padded).logits[real], wanted))
            copied(padded["input_ids"].clamp(min=7, max=9), attention_mask=padded["attention_mask"])
    row = {"backend": "inference_copy", "dtype": str(dtype).removeprefix("torch.")}
    report.append({**row, "padded_error": max(errors)})
    assert max(errors) <= (1e-4 if dtype == torch.float32 else 3 * floor)


def test_replays_follow_ids_boundaries_and_weights(wide_checkpoint):
    """60 ragged batches against the model, in half precision; the weights change in place after the half of them."""
    model = load(wide_checkpoint[2], "auto", best_dtype("cuda"))
    copied = inference_copy(model)
    graphs = copied.model.run_blocks.graphs
    with torch.inference_mode():
        for seed in range(60):
            generator = torch.Generator().manual_seed(seed)
            lengths = torch.randint(1, 60 + 10 * seed, (1 + seed % 7,), generator=generator)
            mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long().cuda()
            ids = torch.randint(5, CONFIG["vocab_size"], mask.shape, generator=generator).cuda()
            if seed == 30:
                for each in (model, copied):
                    each.model.layer_norm.weight.mul_(2)
            wanted, found = (each(ids, attention_mask=mask).logits[mask.bool()] for each in (model, copied))
            assert relative_error(found, wanted.double().cpu()) <= 0.03  # three times the rounding of bfloat16
    backend = choose_backend("auto", Situation((torch.device("cuda", 0),), best_dtype("cuda"), 64, is_packed=True))
    assert bool(graphs) == find_backend(backend).reads_boundaries and len(graphs) < 40


def test_sdpa_makes_few_calls_for_many_sequences_in_fp32(wide_checkpoint):
    """Padded to groups of similar length, 40 sequences agree with eager attention, gradients included."""
    lengths = torch.randint(1, 200, (40,), generator=torch.Generator().manual_seed(0))
    row = {
        "input_ids": torch.randint(5, CONFIG["vocab_size"], (1, int(lengths.sum()))).cuda(),
        "cu_seq_lens_q": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda(),
    }
    results = []
    for backend in ("eager", "sdpa"):
        model = load(wide_checkpoint[2], backend, torch.float32)
        output = model(**row, labels=row["input_ids"])
        output.loss.backward()
        results.append((output.logits, model.model.transformer_encoder[0].qkv.weight.grad))
    for eager, sdpa in zip(*results):
        assert relative_error(sdpa, eager.double().cpu()) <= 1e-4


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_the_golden_checkpoint_agrees_on_the_gpu(backend):
    folder = Path(__file__).with_name("golden")
    expected = load_file(folder / "expected.safetensors")
    real = expected["attention_mask"].bool()
    model = AutoModelForMaskedLM.from_pretrained(folder / "masked_lm", attn_implementation=backend).cuda().eval()
    with torch.no_grad():
        logits = model(**{name: expected[name].cuda() for name in ("input_ids", "attention_mask")}).logits
    assert relative_error(logits.cpu()[real], expected["mlm_logits"][real].double()) <= 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_embeddings_of_the_gpu_equal_those_of_the_cpu(dtype, bound):
    """bf16 has eight bits; 0.03 is three times the error of bf16 on a CPU."""
    skip_emulated(dtype)
    texts = [SENTENCE[: 5 * length] for length in (1, 3, 20, 7, 60)]
    options = {"normalize_embeddings": True, "batch_size": 2}
    wanted = open_embedding_model(MINI_MODEL_PATH, device="cpu").encode(texts, **options)
    model = open_embedding_model(MINI_MODEL_PATH, device="cuda", model_kwargs={"dtype": dtype})
    vectors = model.encode(texts, **options)
    assert np.linalg.norm(vectors - wanted, axis=1).max() <= bound


def test_a_training_on_the_gpu_follows_that_of_the_cpu(tokenizer, tmp_path):
    """fp32, 10 steps of packed rows under Trainer; the sums of a GPU are in another order, 1e-3 is ten times what they change."""
    tokens = tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
    documents = [[tokenizer.cls_token_id, *tokens[: 3 + i % 20], tokenizer.sep_token_id] for i in range(400)]
    curves = []
    for use_cpu in (True, False):
        options = dict(output_dir=str(tmp_path), save_strategy="no", bf16=False, tf32=False, max_steps=10)
        options |= dict(max_length=32, row_tokens=64, tokens_per_step=512, warmup_steps=2, learning_rate=3e-3)
        options |= dict(logging_steps=1, report_to="none", disable_tqdm=True)
        args = PretrainingArguments(**options, use_cpu=use_cpu)
        set_seed(0)
        config = NeoBERTConfig(**{**CONFIG, "vocab_size": len(tokenizer), "sparse_prediction": True})
        rows = packed_rows(documents, args.row_tokens, args.max_length, args.max_steps * args.rows_per_step)
        options = dict(recipe=args.to_recipe(), train_dataset=rows, processing_class=tokenizer)
        collator = PackedMLMCollator(tokenizer)
        trainer = PretrainingTrainer(NeoBERTForMaskedLM(config), args, **options, data_collator=collator)
        trainer.train()
        curves.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(curves[0]) == 10 and curves[0][-1] < curves[0][0]
    assert np.abs(np.subtract(*curves)).max() <= 1e-3


def test_compiled_training_on_packed_rows_compiles_once_for_all_batches(wide_checkpoint):
    """With `max_length_q` and boundaries of one shape, 6 batches of other documents reuse the first graph."""
    model = load(wide_checkpoint[2], "torch_varlen", torch.bfloat16).train()
    compiled = torch.compile(model, fullgraph=True)
    counters.clear()
    losses = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        cuts = torch.randperm(250, generator=generator)[:7].sort().values + 1
        bounds = torch.cat([torch.tensor([0]), cuts, torch.tensor([256])]).int().cuda()
        ids = torch.randint(5, CONFIG["vocab_size"], (1, 256), generator=generator).cuda()
        row = dict(input_ids=ids, labels=ids, cu_seq_lens_q=bounds, max_length_q=256, trust_boundaries=True)
        loss = compiled(**row).loss
        loss.backward()
        with torch.no_grad():
            losses.append((loss.item(), model(**row).loss.item()))
    for loss, plain in losses:
        assert loss == pytest.approx(plain, rel=0.02)  # bf16, fused operations in another order
    assert counters["stats"]["unique_graphs"] == 1
