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
"""

import time
from unittest.mock import patch

import torch
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


STEPS = {each.__name__: each for each in (replays, speed, autotuned)} | {"profile": profiled}


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        steps=["replays", "profile", "speed", "autotuned"],
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
