"""Each CPU kernel of kernels_neobert.py, next to its reference implementation and to variants that were not kept.

    python benchmarks/cpu_kernels.py --json benchmarks/results/cpu_kernels.json

Shapes of one layer, weights in the cache where they fit; variants run in turns. A slower variant stays in the table.
"""

import copy
import statistics

import torch
import torch.nn.functional as F
from harness import DTYPES, finish, read_arguments, take_turns
from torch import nn
from tqdm.auto import tqdm

from neobert_hf import tune_allocator
from neobert_hf.model.blocks_neobert import RMSNorm
from neobert_hf.model.kernels_neobert import (
    InferenceLinear,
    Int8Linear,
    choose_product,
    linear,
    rms_norm,
    tiled_attention,
)
from neobert_hf.model.machine_neobert import has_bf16_instructions
from neobert_hf.model.rotary_neobert import split_and_rotate, split_and_rotate_fast

WIDTH, HEADS, INNER = 768, 12, 2048
FUSED = torch.ops.mkldnn._linear_pointwise


def variants(num_tokens: int, dtype: torch.dtype) -> dict[str, dict]:
    """Functions without arguments, by the part that they compute; the first of each part is the reference."""
    x = torch.randn(num_tokens, WIDTH).to(dtype)
    inner = torch.randn(num_tokens, 2 * INNER).to(dtype)
    gate, up = inner.chunk(2, -1)
    narrow = inner[:, :INNER].contiguous()
    qkv = torch.randn(num_tokens, HEADS, 3, WIDTH // HEADS).to(dtype)
    table = torch.randn(num_tokens, WIDTH // HEADS // 2, 2)
    turns, multiply = torch.view_as_complex(table), choose_product(dtype, num_tokens)
    w12, w3 = (nn.Linear(*shape, bias=False).to(dtype).eval() for shape in ((WIDTH, 2 * INNER), (INNER, WIDTH)))
    packed, int8, wide = InferenceLinear(w12, dtype).eval(), Int8Linear(w12, torch.float32).eval(), x.float()
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(copy.deepcopy(w12).float()), {nn.Linear})
    norm = RMSNorm(WIDTH, eps=1e-5).to(dtype)
    by_head = split_and_rotate_fast(qkv, turns, True)
    by_token = split_and_rotate_fast(qkv, turns, False)
    heads, wide_heads = ([tensor.transpose(0, 1)[None] for tensor in q_k_v] for q_k_v in (by_head, by_token))

    def fused_feed_forward():
        gate = FUSED(x, w12.weight[:INNER], None, "swish", [], "")
        return FUSED.binary(x, gate, w12.weight[INNER:], None, "mul")

    def tiled_eager():
        blocks = [(part @ heads[1].mT * 0.125).softmax(-1) @ heads[2] for part in heads[0].split(64, dim=2)]
        return torch.cat(blocks, 2)

    def norm_by_layer_norm():
        both = F.layer_norm(torch.cat([x, -x], -1), (2 * WIDTH,), torch.cat([norm.weight] * 2), None, 1e-5)
        return both[:, :WIDTH]

    runs = {
        "product w12": {
            "F.linear": lambda: F.linear(x, w12.weight),
            "ours": lambda: linear(w12, x, multiply),
            "oneDNN": lambda: FUSED(x, w12.weight, None, "none", [], ""),
            "ours, prepacked": lambda: linear(packed, x, multiply),
            "ours, int8, a scale for each row": lambda: linear(int8, wide, multiply),
            "int8 of torch.ao, one scale": lambda: quantized(wide),
        },
        "product w12, silu, multiply": {
            "F.linear and plain arithmetic": lambda: F.silu((y := F.linear(x, w12.weight).chunk(2, -1))[0]) * y[1],
            "ours": lambda: F.silu((y := linear(w12, x, multiply).chunk(2, -1))[0]).mul_(y[1]),
            "silu and multiply fused into two products": fused_feed_forward,
        },
        "product w3 and residual": {
            "F.linear, +": lambda: x + F.linear(narrow, w3.weight),
            "ours": lambda: x + linear(w3, narrow, multiply),
            "residual fused (addmm)": lambda: torch.addmm(x, narrow, w3.weight.t()),
            "residual fused (oneDNN)": lambda: FUSED.binary(narrow, x, w3.weight, None, "add"),
        },
        "silu, multiply": {
            "plain": lambda: F.silu(gate) * up,
            "ours": lambda: F.silu(gate).mul_(up),
        },
        "norm": {
            "F.rms_norm": lambda: F.rms_norm(x, (WIDTH,), norm.weight, 1e-5),
            "ours": lambda: rms_norm(x, norm),
            "F.layer_norm of x and -x": norm_by_layer_norm,
            "F.layer_norm (another function; the floor)": lambda: F.layer_norm(x, (WIDTH,), norm.weight),
        },
        "rotary and heads apart": {
            "plain, heads copied": lambda: [t.transpose(0, 1).contiguous() for t in split_and_rotate(qkv, table)],
            "ours, head by head": lambda: split_and_rotate_fast(qkv, turns, True),
            "ours, token by token": lambda: split_and_rotate_fast(qkv, turns, False),
        },
        "attention": {
            "SDPA": lambda: F.scaled_dot_product_attention(*heads),
            "SDPA in float32, token by token": lambda: F.scaled_dot_product_attention(*wide_heads),
            "ours in blocks": lambda: tiled_attention(*by_head, (num_tokens,)),
            "softmax of 64 rows at a time": tiled_eager,
        },
    }
    if dtype == torch.bfloat16 and not has_bf16_instructions():  # oneDNN raises an error instead of emulating bf16
        for part in runs.values():
            for name in [name for name in part if "oneDNN" in name or "fused into" in name]:
                del part[name]
    return runs


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(__doc__, num_tokens=[16, 128, 2048], dtypes=["bfloat16", "float32"], num_rounds=15)
    tune_allocator()
    rows = []
    cases = [(dtype, num_tokens) for dtype in arguments.dtypes for num_tokens in arguments.num_tokens]
    with torch.inference_mode():
        for dtype, num_tokens in tqdm(cases, desc="shapes", unit=" shapes"):
            for part, runs in variants(num_tokens, DTYPES[dtype]).items():
                seconds = take_turns(runs, arguments.num_rounds, "cpu", part)
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
    finish("cpu_kernels", rows, arguments)


if __name__ == "__main__":
    main()
