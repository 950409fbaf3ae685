"""Expected tokens/s on GPUs: operations, bytes and kernel launches of a forward, over the rates of data sheets.

    python benchmarks/roofline.py --json benchmarks/results/roofline.json
    python benchmarks/roofline.py --measured benchmarks/results/gpu/CARD        (compares a run of gpu.sh with it)

A forward takes the time of its matrix products, of attention, and of the bytes that all other operations read and write, one
after another. As loaded, every operation of PyTorch reads and writes memory. In the compiled regions of `inference_copy`, a norm
with its addition, the rotation and SwiGLU are one kernel each. "Products alone" is the ceiling of harness.py. Batches are so
large that weights and launches do not count; for one short text nothing else counts.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from harness import finish, read_arguments
from result_tables import RESULTS, rows_table

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM

# The two fitted factors, from the H200 at 512 tokens (throughput_gpu_bfloat16.json): its ceiling, and the model as loaded.
PRODUCTS, MEMORY = 0.79, 0.46  # shares of the peak rate of products, and of the peak bandwidth
# Kernels of a block: 4 products, attention, 2 norms, 3 for the rotation, a copy of the values, 2 for SwiGLU, 2 additions; in
# float16 each norm casts its weight and its result. One text of 16 to 512 tokens took 9 to 18 ms on the H200: 21 to 43 us each.
LAUNCHES = {"bfloat16": 28 * 15, "float16": 28 * 19}
ONE_TEXT_MS = {dtype: (round(count * 0.0214), round(count * 0.0429)) for dtype, count in LAUNCHES.items()}


class Card(NamedTuple):
    """A GPU: the peaks of its data sheet, the shares of them that are expected, and what a run must reach."""

    label: str
    dtype: str
    tflops: float  # dense, half precision
    gb_per_s: float
    products: float  # share of the peak that products reach
    attention: float  # share of the peak that attention reaches, as published for its kernel
    wrong_below: float  # share of the expected figure


# By the name that torch gives. Peaks: NVIDIA's data sheets of T4, A100, H100 and H200; those of the last two give 1,979 TFLOP/s
# with sparsity, twice the dense rate. Products of the T4: forums.developer.nvidia.com/t/about-gpu-peak-performance/264462 has
# 24 TFLOP/s, because the power limit of 70 W holds the clock down. Attention: FlashAttention (T4, as kernels of its kind)
# 25 % and FlashAttention-2 50 % of an A100's peak (arXiv 2307.08691, the lower ends), FlashAttention-2 35 % of an H100's
# (arXiv 2407.08608). FlashAttention-3 is faster.
CARDS = {
    "Tesla T4": Card("T4", "float16", 65, 320, 24 / 65, 0.25, 0.5),
    "NVIDIA A100-SXM4-40GB": Card("A100 SXM 40 GB", "bfloat16", 312, 1555, PRODUCTS, 0.5, 0.7),
    "NVIDIA A100-SXM4-80GB": Card("A100 SXM 80 GB", "bfloat16", 312, 2039, PRODUCTS, 0.5, 0.7),
    "NVIDIA H100 80GB HBM3": Card("H100 SXM", "bfloat16", 989, 3350, PRODUCTS, 0.35, 0.8),
    "NVIDIA H200": Card("H200", "bfloat16", 989, 4800, PRODUCTS, 0.35, 0.8),
}
LENGTHS = (512, 1024, 2048, 4096, 8192)  # of Table 10
VARIANTS = ("ours", "ours-prepacked", "ceiling")
WHOLE = "ours-compiled"  # torch.compile of the whole model, as it was measured once


@cache
def flops_per_token() -> tuple[int, int]:
    """Operations of the blocks' products for a token, and of attention for a token and each token of its sequence."""
    with torch.device("meta"):
        model = NeoBERTForMaskedLM(NeoBERTConfig())
    linear = [layer.weight.numel() for layer in model.model.modules() if isinstance(layer, torch.nn.Linear)]
    return 2 * sum(linear), 4 * model.config.hidden_size * model.config.num_hidden_layers


def bytes_per_token(variant: str, dtype: str, length: int, config: NeoBERTConfig) -> int:
    """Bytes that operations other than products and attention read and write for a token."""
    width, inner = config.hidden_size, config.swiglu_width
    stream = 4 if dtype == "float16" else 2  # bytes of a number in the residual stream (`NeoBERTModel.embed`)
    norm, add = (4 + 4 + 4 + 2 if stream == 4 else 2 + 2), 2 * stream + 2
    to_fp32_and_back = 2 * (2 + 4) + 2 * (4 + 4) + 2 * (4 + 2)  # queries and keys: cast, rotate, cast
    if variant == "published":  # an unfused norm; the mask for each head: int64 to bool to the dtype, read by attention
        norm, add = (2 + 4) + (4 + 4) + 4 + (4 + 4) + (4 + 2) + (2 + 2), 6
        mask = config.num_attention_heads * length * ((8 + 1) + (1 + 2) + 2)
        block = width * (2 * norm + 2 * add + to_fp32_and_back) + 10 * inner + mask
    elif variant == "ours":  # with a contiguous copy of the values; silu reads 1 and writes 1, the product 2 and 1
        block = width * (2 * norm + 2 * add + to_fp32_and_back + 4) + 10 * inner
    else:  # with a contiguous copy of the values
        block = width * (2 * (add + 2) + 2 * (2 + 2) + 4) + 6 * inner
    return block * config.num_hidden_layers


def expected(card: Card, variant: str, length: int) -> float:
    """Tokens/s of a variant, a model of throughput.py, on full-length sequences in the dtype of the card."""
    products, attention = flops_per_token()
    rate = card.tflops * 1e12
    if variant == "ceiling":
        return rate * card.products / (products + attention * length)
    seconds = products / (rate * card.products) + attention * length / (rate * card.attention)
    moved = bytes_per_token(variant, card.dtype, length, NeoBERTConfig())
    return 1 / (seconds + moved / (card.gb_per_s * 1e9 * MEMORY))


def compare(result: dict) -> list[dict]:
    """A row with measured and expected tokens/s for each model and length of throughput.py on one GPU, and what follows."""
    card, rows = CARDS[result["gpu"]], []
    products, attention = flops_per_token()
    for row in result["rows"]:
        if row["length"] not in LENGTHS or row["model"] not in (*VARIANTS, WHOLE, "published"):
            continue
        wanted, speed = expected(card, row["model"], row["length"]), row["tokens_per_s"]
        verdict = "as expected" if speed >= card.wrong_below * wanted else "WRONG: too slow"
        if speed * (products + attention * row["length"]) > card.tflops * 1e12:
            verdict = "WRONG: more operations than the data sheet allows"
        found = {"model": row["model"], "length": row["length"], "tokens_per_s": speed, "expected": wanted}
        rows.append({**found, "share_of_expected": speed / wanted, "verdict": verdict})
    return rows


def verdict(folder: Path) -> str:
    """A table of measured and expected figures for the results in the folder of a card."""
    results = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("throughput*.json"))]
    if not results:
        raise SystemExit(f"{folder} has no throughput_*.json: that stage did not end, so there is nothing to compare")
    gpu = results[0]["gpu"]
    if gpu not in CARDS:
        return f"{gpu}: no expected figures, they exist for {', '.join(CARDS)} only. The measured ones are in {folder}."
    results = [result for result in results if result["settings"]["dtype"] == CARDS[gpu].dtype]
    if not results:
        return f"{gpu}: the expected figures are those of {CARDS[gpu].dtype}. The measured ones are in {folder}."
    rows = [row for result in results if result["gpu"] == gpu for row in compare(result)]
    missing = sorted(set(LENGTHS) - {row["length"] for row in rows if row["model"] == "ours"})
    table = rows_table(results[-1] | {"rows": rows})
    table += f"\n\nNot measured, so not compared: NeoBERT at {missing} tokens." if missing else ""
    lowest, highest = ONE_TEXT_MS[CARDS[gpu].dtype]
    for row in (row for result in results for row in result["rows"] if (row["model"], row["length"]) == ("ours", 16)):
        found = "as expected" if row["milliseconds"] <= 2 * highest else "WRONG: too slow"
        table += f"\n\nOne text of 16 tokens: {row['milliseconds']:.0f} ms; expected {lowest} to {highest} ms: {found}."
    return table


def main():
    """Print the expected figures and one line of JSON, or the comparison of a run with them."""
    arguments = read_arguments(__doc__, measured="")
    if arguments.measured:
        text = verdict(Path(arguments.measured))
        print(text)
        raise SystemExit(int("WRONG" in text))
    rows = [
        {"gpu": name, "card": card.label, "dtype": card.dtype, "wrong_below": card.wrong_below, "length": length}
        | {variant: expected(card, variant, length) for variant in VARIANTS}
        for name, card in CARDS.items()
        for length in LENGTHS
    ]
    check = []
    for name, models in {"": (*VARIANTS, "published"), "_compiled": (WHOLE,)}.items():
        result = json.loads((RESULTS / f"throughput_gpu_bfloat16{name}.json").read_text("utf-8"))
        check += [row for row in compare(result) if row["model"] in models]
    factors = {"products": PRODUCTS, "memory": MEMORY}
    finish("roofline", rows, arguments, check=check, factors=factors, launches=LAUNCHES, one_text_ms=ONE_TEXT_MS)


if __name__ == "__main__":
    main()
