"""Each fast path of kernels_neobert.py beside its plain twin and beside what was tried and not taken.

    python benchmarks/fast_paths.py --json benchmarks/results/fast_paths_cpu.json

One layer's shapes, everything hot; the variants take turns. A variant that lost stays in the table.
"""

import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from harness import DTYPES, finish
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from neobert_hf import tune_allocator
from neobert_hf.kernels_neobert import Linear, RMSNorm, blocked_attention, split_and_rotate, swiglu

WIDTH, HEADS, INNER = 768, 12, 2048
FUSED = torch.ops.mkldnn._linear_pointwise


@dataclass
class FastPathArguments:
    """What to measure."""

    num_tokens: list[int] = field(default_factory=lambda: [128, 2048], metadata={"help": "Tokens, in one sequence."})
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16", "float32"], metadata={"help": "Dtypes."})
    num_rounds: int = field(default=15, metadata={"help": "Turns that each variant takes."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def variants(num_tokens: int, dtype: torch.dtype) -> dict[str, dict]:
    """Functions of no arguments, by the part that they compute; the first of each is the plain twin, the second ours."""
    evaluating = torch.nn.Module().eval()
    training = torch.nn.Module().train()
    x = torch.randn(num_tokens, WIDTH).to(dtype)
    inner = torch.randn(num_tokens, 2 * INNER).to(dtype)
    narrow = inner[:, :INNER].contiguous()
    qkv = torch.randn(num_tokens, HEADS, 3, WIDTH // HEADS).to(dtype)
    table = torch.randn(num_tokens, WIDTH // HEADS // 2, 2)
    w12, w3 = (Linear(*shape, bias=False).to(dtype).eval() for shape in ((WIDTH, 2 * INNER), (INNER, WIDTH)))
    packed = Linear(WIDTH, 2 * INNER, bias=False).to(dtype).eval()
    packed.pack()
    norm, plain_norm = (RMSNorm(WIDTH, eps=1e-5).to(dtype).train(mode) for mode in (False, True))
    q, k, v = split_and_rotate(qkv, table, evaluating)
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]

    def fused_feed_forward():
        gate = FUSED(x, w12.weight[:INNER], None, "swish", [], "")
        return FUSED.binary(x, gate, w12.weight[INNER:], None, "mul")

    def blocked_eager():
        blocks = [(part @ heads[1].mT * 0.125).softmax(-1) @ heads[2] for part in heads[0].split(64, dim=2)]
        return torch.cat(blocks, 2)

    return {
        "product w12": {
            "F.linear": lambda: F.linear(x, w12.weight),
            "ours": lambda: w12(x),
            "ours, packed": lambda: packed(x),
        },
        "product w12, silu, multiply": {
            "F.linear and plain arithmetic": lambda: swiglu(F.linear(x, w12.weight), training),
            "ours": lambda: swiglu(w12(x), evaluating),
            "silu and multiply fused into two products": fused_feed_forward,
        },
        "product w3 and residual": {
            "F.linear, +": lambda: x + F.linear(narrow, w3.weight),
            "ours": lambda: x + w3(narrow),
            "residual fused (addmm)": lambda: torch.addmm(x, narrow, w3.weight.t()),
            "residual fused (oneDNN)": lambda: FUSED.binary(narrow, x, w3.weight, None, "add"),
        },
        "silu, multiply": {
            "plain": lambda: swiglu(inner, training),
            "ours": lambda: swiglu(inner, evaluating),
        },
        "norm": {
            "F.rms_norm": lambda: plain_norm(x),
            "ours": lambda: norm(x),
            "F.layer_norm (another function; the floor)": lambda: F.layer_norm(x, (WIDTH,), norm.weight),
        },
        "rotary and heads apart": {
            "plain, heads copied": lambda: [
                t.transpose(0, 1).contiguous() for t in split_and_rotate(qkv, table, training)
            ],
            "ours": lambda: split_and_rotate(qkv, table, evaluating),
        },
        "attention": {
            "SDPA": lambda: F.scaled_dot_product_attention(*heads),
            "ours": lambda: blocked_attention(q, k, v, (num_tokens,)),
            "softmax of 64 rows at a time": blocked_eager,
        },
    }


def main():
    """Measure, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(FastPathArguments).parse_args_into_dataclasses()
    tune_allocator()
    rows = []
    cases = [(dtype, num_tokens) for dtype in arguments.dtypes for num_tokens in arguments.num_tokens]
    with torch.inference_mode():
        for dtype, num_tokens in tqdm(cases, desc="shapes", unit=" shapes"):
            for part, runs in variants(num_tokens, DTYPES[dtype]).items():
                seconds = {name: [] for name in runs}
                for number in range(arguments.num_rounds + 2):
                    for name, run in runs.items():
                        started = time.perf_counter()
                        run()
                        if number >= 2:
                            seconds[name].append(time.perf_counter() - started)
                first = next(iter(runs))
                for name in runs:
                    median = statistics.median(seconds[name])
                    rows.append(
                        {
                            "dtype": dtype,
                            "tokens": num_tokens,
                            "part": part,
                            "variant": name,
                            "microseconds": median * 1e6,
                            "speed_over_plain": statistics.median(seconds[first]) / median,
                        }
                    )
    finish("fast_paths", rows, arguments)


if __name__ == "__main__":
    main()
