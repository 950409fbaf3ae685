"""`inference_copy` on a GPU, without and with CUDA graphs, beside the model as loaded and torch.compile of the whole model.

    python benchmarks/gpu_fast_path.py --steps speed autotuned --json benchmarks/results/gpu/CARD/fast_path_bfloat16.json
    python benchmarks/gpu_fast_path.py --device cpu --num_layers 2 --max_tokens 64 --num_rounds 1          (a rehearsal)

Steps:
- `replays`: 100 texts of 128 tokens, and 100 batches of 4 x 128, of other tokens and lengths each time: the largest difference
  between the copies and the model as loaded, over the largest value; ms of each; the number of CUDA graphs.
- `profile`: time of each kernel in one forward of `--max_tokens` tokens in rows of 512; GB/s of the generated kernels together,
  with the bytes of roofline.py.
- `speed`: rows of 512 and 4,096 tokens, a text of 16 and a ragged batch, as loaded and copied, A B A B; at 512 also compiled as a
  whole.
- `autotuned`: the copy at 512 tokens with regions that are compiled with "max-autotune-no-cudagraphs", A B A B.
- `levers`: the copy at 512 tokens with torch_varlen, A B A B with what may be faster: additions outside of the products
  (`add_outside`), one kernel for the rotation (`rotate_at_once`), both, SwiGLU in the product by quack (`gate_in_product`, pip
  install quack-kernels), and each with FlashAttention 3, if it is installed. A row that lacks its package is named and left out.
"""

import sys
import time
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import torch
import torch.nn.functional as F
from harness import (
    DTYPES,
    build,
    finish,
    free,
    median_and_spread,
    median_ratio,
    read_arguments,
    synchronize,
    take_turns,
)
from ragged import log_normal_lengths
from roofline import bytes_per_token
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from neobert_hf import inference_copy
from neobert_hf.model import gpu_neobert
from neobert_hf.model.backends_neobert import BACKENDS
from neobert_hf.model.machine_neobert import widen


def make_batch(lengths: list[int], device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Padded rows of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 30_000, mask.shape, generator=generator)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def full_batch(length: int, arguments) -> dict[str, torch.Tensor]:
    """Rows of one length, together at most `--max_tokens`; 16 tokens are one text."""
    length = min(length, arguments.max_tokens)
    rows = 1 if length == 16 else arguments.max_tokens // length
    return make_batch([length] * rows, arguments.device)


def replays(models, arguments) -> list[dict]:
    """Compare texts and batches that differ each time."""
    rows, generator = [], torch.Generator().manual_seed(0)
    longest = min(128, arguments.max_tokens)
    for num_rows in (1, 4):
        worst, seconds, num_runs = 0.0, {name: [] for name in models}, 100 if arguments.device == "cuda" else 3
        for seed in range(num_runs + 1):
            lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator).tolist()
            batch, states = make_batch(lengths, arguments.device, seed), {}
            for name, runs in seconds.items():
                synchronize(arguments.device)
                started = time.perf_counter()
                states[name] = models[name](**batch).last_hidden_state
                synchronize(arguments.device)
                runs += [time.perf_counter() - started] if seed else []
            wanted = states.pop("ours")
            differences = [(copied - wanted).abs().max() / wanted.abs().max() for copied in states.values()]
            worst = max(worst, *(difference.item() for difference in differences))
        for name, runs in seconds.items():
            row = {"step": "replays", "model": name, "batch": f"{num_rows} x up to {longest}"}
            row |= {"ms": median_and_spread(runs)[0] * 1000, "largest difference": worst}
            rows.append(row | {"graphs": len(models[name].run_blocks.graphs) if name == "ours-graphs" else 0})
    return rows


def speed(models, arguments) -> list[dict]:
    """Models in turns, on full rows and on a ragged batch."""
    rows = min(256, max(arguments.max_tokens // 128, 1))
    lengths = log_normal_lengths(rows, min(512, arguments.max_tokens), torch.Generator().manual_seed(0))
    batches = {f"rows of {length}": full_batch(length, arguments) for length in (512, 4096)}
    batches |= {"a text of 16": full_batch(16, arguments), f"{rows} ragged rows": make_batch(lengths, arguments.device)}
    found, whole = [], {"ours-compiled": torch.compile(models["ours"], dynamic=True)}
    for name, batch in batches.items():
        contenders = models | (whole if name == "rows of 512" else {})
        found += compare("speed", contenders, name, batch, arguments)
    return found


def autotuned(models, arguments) -> list[dict]:
    """The copy as it is, and with autotuned regions."""
    regions = gpu_neobert.project, gpu_neobert.finish
    tuned = [torch.compile(each, dynamic=True, mode="max-autotune-no-cudagraphs") for each in regions]

    def run_tuned(**batch):
        with patch.object(gpu_neobert, "compiled_regions", lambda: tuned):
            return models["ours-prepacked"](**batch)

    contenders = {"ours-prepacked": models["ours-prepacked"], "ours-autotuned": run_tuned}
    return compare("autotuned", contenders, "rows of 512", full_batch(512, arguments), arguments)


def rotate_at_once(block, x_TD, table):
    """`gpu_neobert.project`, whose queries, keys and values one pointwise kernel can write: values are rotated by no angle."""
    qkv_TD = F.linear(gpu_neobert._normalize(x_TD, block.attention_norm), block.qkv.weight)
    pairs_TH3C2 = qkv_TD.unflatten(-1, (-1, 3, block.head_dim // 2, 2)).to(table.dtype)
    cos, sin = table[:, None, None, :, :, None].unbind(-2)
    signs = 2 * torch.arange(2, device=table.device) - 1
    turned = pairs_TH3C2 * cos + pairs_TH3C2.flip(-1) * (sin * signs)
    is_value = (torch.arange(3, device=table.device) == 2)[:, None, None]
    parts_3THK = torch.where(is_value, pairs_TH3C2, turned).to(qkv_TD.dtype).flatten(-2).movedim(2, 0).contiguous()
    return tuple(parts_3THK.unbind(0))


def add_wide(x_TD, product_TD):
    """A residual addition that the compiler does not move into the product, for which it would copy `x_TD`."""
    return (widen(x_TD) + widen(product_TD)).to(x_TD.dtype)


def add_and_normalize(block, x_TD, out_THK):
    """The part of `gpu_neobert.finish` before SwiGLU: the residual stream, and its norm."""
    x_TD = add_wide(x_TD, F.linear(out_THK.flatten(1), block.wo.weight))
    return x_TD, gpu_neobert._normalize(x_TD, block.ffn_norm)


def add_gated(block, x_TD, hidden_TF):
    """The part of `gpu_neobert.finish` after SwiGLU's gate."""
    return add_wide(x_TD, F.linear(hidden_TF, block.ffn.w3.weight))


def add_outside(block, x_TD, out_THK):
    """`gpu_neobert.finish`, whose residual additions are pointwise kernels."""
    x_TD, normed_TD = add_and_normalize(block, x_TD, out_THK)
    gate_TF, up_TF = F.linear(normed_TD, block.ffn.w12.weight).chunk(2, dim=-1)
    return add_gated(block, x_TD, F.silu(gate_TF) * up_TF)


def gate_in_product(before, after, gemm_gated, block, x_TD, out_THK):
    """`add_outside`, whose gate is computed where the product w12 ends; `gemm_gated` of quack is not compiled."""
    x_TD, normed_TD = before(block, x_TD, out_THK)
    options = {"activation": "swiglu", "store_preact": False, "concat_layout": ("B",)}
    _, hidden_TF = gemm_gated(normed_TD, block.ffn.w12.weight.T, **options)
    return after(block, x_TD, hidden_TF)


def contenders_of_levers(copied):
    """The regions and the attention of each row, by its name."""
    compiled = partial(torch.compile, dynamic=True)
    project, finish = gpu_neobert.compiled_regions()
    project_once, finish_outside = compiled(rotate_at_once), compiled(add_outside)
    found = {
        "ours-prepacked": (project, finish),
        "additions outside": (project, finish_outside),
        "rotation at once": (project_once, finish),
        "both": (project_once, finish_outside),
    }
    if find_spec("quack"):
        from quack.gemm_interface import gemm_gated

        gated = partial(gate_in_product, compiled(add_and_normalize), compiled(add_gated), gemm_gated)
        found["both, gate in product"] = (project_once, gated)
    else:
        print("gate in product: left out, pip install quack-kernels", file=sys.stderr)
    found = {name: (regions, "torch_varlen") for name, regions in found.items()}
    flash = BACKENDS["flash_attention_3"]
    if flash.is_installed():
        found |= {f"{name}, FlashAttention 3": (found[name][0], "flash_attention_3") for name in list(found)}
    else:
        print(f"FlashAttention 3: left out, {flash.remedy}", file=sys.stderr)
    return found


def levers(models, arguments) -> list[dict]:
    """The copy as it is, and with what may be faster: speeds, and the largest difference over the largest value."""
    copied = models["ours-prepacked"]

    def run(regions, attention, **batch):
        with ExitStack() as stack:
            stack.enter_context(patch.object(gpu_neobert, "compiled_regions", lambda: regions))
            if arguments.device == "cuda":
                stack.enter_context(patch.object(copied.config, "_attn_implementation_internal", attention))
            return copied(**batch)

    contenders = {name: partial(run, *lever) for name, lever in contenders_of_levers(copied).items()}
    batch = full_batch(512, arguments)
    rows = compare("levers", contenders, "rows of 512", batch, arguments)
    wanted = contenders["ours-prepacked"](**batch).last_hidden_state
    for row in rows:
        states = contenders[row["model"]](**batch).last_hidden_state
        row["largest difference"] = ((states - wanted).abs().max() / wanted.abs().max()).item()
    return rows


def compare(step: str, models: dict, name: str, batch: dict[str, torch.Tensor], arguments) -> list[dict]:
    """A row for each model: tokens/s, ms, and its speed over that of the first model."""
    firsts = {}
    for key, model in models.items():
        started = time.perf_counter()
        model(**batch)
        synchronize(arguments.device)
        firsts[key] = time.perf_counter() - started
    runs = {key: lambda model=model: model(**batch) for key, model in models.items()}
    seconds = take_turns(runs, arguments.num_rounds, arguments.device, name)
    first, num_tokens, rows = next(iter(seconds.values())), int(batch["attention_mask"].sum()), []
    for key, values in seconds.items():
        median, spread = median_and_spread(values)
        row = {"step": step, "model": key, "batch": name, "tokens_per_s": num_tokens / median, "ms": median * 1000}
        rows.append(row | {"speed": median_ratio(first, values), "spread": spread, "first call, s": firsts[key]})
    free(arguments.device)
    return rows


def profiled(models, arguments) -> list[dict]:
    """Time of each kernel in one forward of the copy."""
    batch, is_gpu = full_batch(512, arguments), arguments.device == "cuda"
    copied, num_tokens = models["ours-prepacked"], batch["input_ids"].numel()
    for _ in range(3):
        copied(**batch)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]) as profiler:
        copied(**batch)
        synchronize(arguments.device)
    key, device = ("self_device_time_total", DeviceType.CUDA) if is_gpu else ("self_cpu_time_total", DeviceType.CPU)
    events = [
        event for event in profiler.key_averages() if event.device_type == device and not event.is_user_annotation
    ]
    times = {event.key: (getattr(event, key) / 1000, event.count) for event in events}
    total = sum(ms for ms, _ in times.values())
    rows = [
        {"step": "profile", "kernel": name[:80], "calls": calls, "ms": ms, "share": ms / total}
        for name, (ms, calls) in sorted(times.items(), key=lambda item: -item[1][0])[:20]
    ]
    generated = sum(ms for name, (ms, _) in times.items() if name.startswith("triton_"))
    if generated:
        moved = num_tokens * bytes_per_token("ours-prepacked", arguments.dtype, 512, copied.config)
        row = {"step": "profile", "kernel": "all generated", "ms": generated, "share": generated / total}
        rows.append(row | {"GB/s": moved / generated / 1e6})
    return rows


STEPS = {each.__name__: each for each in (replays, speed, autotuned, levers)} | {"profile": profiled}


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        steps=["replays", "profile", "speed", "autotuned", "levers"],
        device="cuda",
        dtype="bfloat16",
        num_layers=0,
        num_rounds=5,
        max_tokens=131_072,
    )
    if unknown := set(arguments.steps) - set(STEPS):
        raise SystemExit(f"--steps: {', '.join(sorted(unknown))} is not one of {', '.join(STEPS)}")
    ours = build("ours", DTYPES[arguments.dtype], arguments.device, 4096, arguments.num_layers)
    models = {"ours": ours, "ours-prepacked": inference_copy(ours, cuda_graphs=False)}
    if arguments.device == "cuda":
        models["ours-graphs"] = inference_copy(ours)
    with torch.inference_mode():
        rows = [row for step in arguments.steps for row in STEPS[step](models, arguments)]
    finish("gpu_fast_path", rows, arguments)


if __name__ == "__main__":
    main()
