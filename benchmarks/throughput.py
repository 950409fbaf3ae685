"""Tokens per second of encoders on full-length sequences, as in the paper's Table 10 (section 5.4).

    python benchmarks/throughput.py --dtype bfloat16 --json benchmarks/results/throughput_cpu_bfloat16.json
    python benchmarks/throughput.py --models ours published --lengths 512 --num_layers 4           (a quick run)
    python benchmarks/throughput.py --table_10                      (the models and lengths of the paper's table)

At each length, every model doubles its batch until memory or `--max_tokens` is reached, and keeps the fastest batch. Then the
models run in turns, A B A B, and medians are reported; a ratio is the median of the ratios within a turn. The ceiling is the
speed of our model's matrix products alone, measured in the same turns. Weights are random. Models:
`published` is the forward pass of the published code (see published.py), `ours-prepacked` `inference_copy` of our model,
`openvino` our model exported; the others are those of harness.py. A length of 16 tokens is measured with a single sequence.
`--num_layers 0` is the whole model.
"""

import time

import torch
from harness import (
    DTYPES,
    MODELS,
    OURS,
    Ceiling,
    OpenVINOModel,
    build,
    finish,
    free,
    median_and_spread,
    median_ratio,
    read_arguments,
    relative_error,
    synchronize,
    take_turns,
)
from tqdm.auto import tqdm

from neobert_hf import tune_allocator

# Table 10 of the paper: one A100, tokens/s.
PAPER = {
    "bert-base": {512: 27_600},
    "bert-large": {512: 19_500},
    "roberta-base": {512: 24_900},
    "roberta-large": {512: 15_900},
    "modernbert-base": {512: 25_400, 1024: 22_600, 2048: 17_200, 4096: 11_700, 8192: 6_800},
    "modernbert-large": {512: 13_400, 1024: 11_400, 2048: 9_200, 4096: 6_500, 8192: 3_800},
    "published": {512: 24_500, 1024: 22_200, 2048: 20_500, 4096: 17_200, 8192: 13_000},
}


class Contender:
    """A model and its inputs for a batch of full-length sequences."""

    def __init__(self, name: str, model, device: str):
        self.name, self.model, self.device = name, model, device
        self.vocab_size = 30_000

    def runner(self, batch: int, length: int):
        """A function that runs one batch; only `published` requires a mask."""
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(5, self.vocab_size, (batch, length), generator=generator).to(self.device)
        if self.name == "published":
            mask = torch.ones_like(ids)
            return lambda: self.model(ids, mask)
        return lambda: self.model(ids)


def best_batch(contender: Contender, length: int, max_tokens: int) -> int:
    """Double the batch until memory or `max_tokens` is reached; returns the batch with the most tokens/s."""
    best, batch = (0.0, 1), 1
    while 2 * length <= max_tokens and batch * length <= max_tokens:
        try:
            seconds = take_turns({"": contender.runner(batch, length)}, 1, contender.device, "batch")[""]
        except torch.cuda.OutOfMemoryError:
            free(contender.device)
            break
        best = max(best, (batch * length / seconds[0], batch))
        batch *= 2
    return best[1]


def measure_length(contenders, ceiling, length, arguments) -> list[dict]:
    """One row for each model at one length, and one for the ceiling."""
    first_calls = {}
    for contender in contenders:  # models that compile do it here
        started = time.perf_counter()
        contender.runner(1, length)()
        synchronize(arguments.device)
        first_calls[contender.name] = time.perf_counter() - started
    batches = {
        contender.name: 1 if length == 16 else best_batch(contender, length, arguments.max_tokens)
        for contender in tqdm(contenders, desc=f"best batch at {length}", unit=" models", leave=False)
    }
    runners = {contender.name: contender.runner(batches[contender.name], length) for contender in contenders}
    reference = next((name for name in OURS if name in batches), contenders[0].name)
    batches["ceiling"] = batches[reference]
    runners["ceiling"] = lambda: ceiling(batches["ceiling"] * length)
    num_rounds = arguments.num_rounds * (4 if length <= 128 else 1)
    seconds = take_turns(runners, num_rounds, arguments.device, f"{length} tokens")
    per_token = {name: [s / (batches[name] * length) for s in runs] for name, runs in seconds.items()}
    rows = []
    for name, runs in seconds.items():
        median, spread = median_and_spread(runs)
        tokens = batches[name] * length
        speed = ceiling.tokens_per_s(tokens, median, length) if name == "ceiling" else tokens / median
        row = {"model": name, "length": length, "batch": batches[name], "tokens_per_s": speed, "spread": spread}
        row["milliseconds"] = median * 1000
        row["first_call_s"] = first_calls.get(name)
        if name != "ceiling":
            row["ours_over_it"] = median_ratio(per_token[name], per_token[reference])
            row["share_of_ceiling"] = speed / ceiling.tokens_per_s(
                batches["ceiling"] * length, median_and_spread(seconds["ceiling"])[0], length
            )
        row["paper_a100_tokens_per_s"] = PAPER.get(name, {}).get(length)
        rows.append(row)
    return rows


@torch.inference_mode()
def rounding_errors(arguments) -> list[dict]:
    """Errors of our forward and of the published one in `dtype`, against our reference in float64, on a few sequences."""
    names = [name for name in ("ours", "ours-prepacked", "ours-int8", "published") if name in arguments.models]
    rows = []
    for length in [length for length in arguments.lengths if length <= 512]:
        model = build("ours", torch.float64, arguments.device, length, arguments.num_layers)
        batch = max(1024 // length, 1)  # the error varies by 3 % between sequences
        wanted = Contender("ours", model, arguments.device).runner(batch, length)().last_hidden_state
        for name in tqdm(names, desc=f"error at {length}", unit=" models", leave=False):
            model = build(name, DTYPES[arguments.dtype], arguments.device, length, arguments.num_layers)
            states = Contender(name, model, arguments.device).runner(batch, length)()
            states = states if isinstance(states, torch.Tensor) else states.last_hidden_state
            rows.append({"model": name, "length": length, "error": relative_error(states, wanted)})
    return rows


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        models=["ours", "ours-prepacked", "published", "bert-base", "nomic-bert", "modernbert-base"],
        lengths=[16, 128, 512, 2048, 4096, 8192],
        device="cpu",
        dtype="bfloat16",
        num_layers=0,
        num_rounds=5,
        max_tokens=4096,
        table_10=False,
    )
    if arguments.table_10:
        arguments.models, arguments.lengths = ["ours", *PAPER], [512, 1024, 2048, 4096, 8192]
    unknown = set(arguments.models) - set(MODELS)
    if unknown:
        raise SystemExit(f"--models: {', '.join(sorted(unknown))} is not one of {', '.join(MODELS)}")
    if arguments.device == "cpu":
        tune_allocator()
    dtype, longest = DTYPES[arguments.dtype], max(arguments.lengths)
    errors = rounding_errors(arguments)
    contenders = []
    for name in tqdm(arguments.models, desc="building", unit=" models", leave=False):
        source = "ours" if name == "openvino" else name
        model = build(source, dtype, arguments.device, longest, arguments.num_layers)
        model = OpenVINOModel(model, dtype) if name == "openvino" else model
        contenders.append(Contender(name, model, arguments.device))
    ceiling = Ceiling(dtype, arguments.device, arguments.num_layers)
    rows = []
    with torch.inference_mode():
        for length in tqdm(arguments.lengths, desc="lengths", unit=" lengths"):
            measured = [
                model for model in contenders if not arguments.table_10 or length in PAPER.get(model.name, [length])
            ]
            rows += measure_length(measured, ceiling, length, arguments)
            free(arguments.device)
    finish("throughput", rows, arguments, errors=errors)


if __name__ == "__main__":
    main()
