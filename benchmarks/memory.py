"""Peak memory by length and batch: inference, and a training step on a ragged batch.

    python benchmarks/memory.py --json benchmarks/results/memory_cpu.json
    python benchmarks/memory.py --num_layers 4 --lengths 512 --batches 1       (a quick run)

Each case runs in its own process. On a CPU the figure is the peak of resident memory, with the default allocator; on a GPU it
is the peak of allocated memory. Batches above `--max_tokens` are skipped, and so is training with
`--train_batch 0`. `above_model_mb` subtracts the memory of the process before the case.
"""

import gc
from pathlib import Path

import torch
from harness import DTYPES, build, finish, in_new_process, read_arguments, synchronize
from ragged import log_normal_lengths, training_step
from tqdm.auto import tqdm


def _resident_mb(field_name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field_name}; memory on a CPU is measured on Linux")


def peak_of(run, device: str) -> tuple[float, float]:
    """Peak memory while `run` runs, in MB, and its increase over the memory before."""
    gc.collect()
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        run()
        synchronize(device)
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = _resident_mb("VmRSS")
        run()
        peak = _resident_mb("VmHWM")
    return peak, peak - before


def measure(case: dict, arguments) -> dict:
    """The row of a case, measured in a new process; without figures if it needs more memory than the GPU has."""
    try:
        peak, above = measure_peak(case, arguments)
    except torch.cuda.OutOfMemoryError:
        peak = above = None
    return {**case, "peak_mb": peak, "above_model_mb": above}


def measure_peak(case: dict, arguments) -> tuple[float, float]:
    """Build the model of a case and run it; the result of `peak_of`."""
    dtype, device, name = DTYPES[arguments.dtype], arguments.device, case["model"]
    if case["what"] == "inference":
        model = build(name, dtype, device, case["length"], arguments.num_layers)
        ids = torch.randint(5, 30_000, (case["batch"], case["length"])).to(device)
        with torch.inference_mode():
            return peak_of(lambda: model(ids, attention_mask=torch.ones_like(ids)), device)
    lengths = log_normal_lengths(case["batch"], case["length"], torch.Generator().manual_seed(0))
    examples = [{"input_ids": torch.randint(105, 30_000, (length,)).tolist()} for length in lengths]
    step = training_step(name, examples, case["length"], arguments)
    return peak_of(lambda: [step(), step()], device)  # the second step has the optimizer's state


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        models=["ours", "published", "modernbert-base"],
        lengths=[512, 2048, 8192],
        batches=[1, 4],
        max_tokens=8192,
        train_batch=8,
        train_length=512,
        device="cpu",
        dtype="bfloat16",
        num_layers=0,
    )
    cases = [
        {"what": "inference", "length": length, "batch": batch, "model": model}
        for length in arguments.lengths
        for batch in arguments.batches
        for model in arguments.models
        if batch == 1 or length * batch <= arguments.max_tokens
    ]
    if arguments.train_batch:
        ragged = {"what": "training step, ragged", "length": arguments.train_length, "batch": arguments.train_batch}
        cases += [{**ragged, "model": model} for model in arguments.models]
    rows = []
    for case in tqdm(cases, desc="cases", unit=" cases"):
        rows.append(in_new_process(measure, case, arguments))
        same = {key: value for key, value in case.items() if key != "model"}
        ours = next((row for row in rows if row["model"] == "ours" and same.items() <= row.items()), None)
        if ours and ours["peak_mb"] and rows[-1]["peak_mb"]:
            rows[-1]["ours_over_it"] = ours["peak_mb"] / rows[-1]["peak_mb"]
    finish("memory", rows, arguments)


if __name__ == "__main__":
    main()
