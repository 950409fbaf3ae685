"""Attention in training on a CPU: forward and backward of one call of SDPA per sequence, and of groups of similar length.

    python benchmarks/training_attention.py --json benchmarks/results/training_attention_cpu.json

Packed rows of about the same number of tokens, in which the sequences have different lengths. Both run in turns; medians, and
ratios within a turn, are reported. `LONGEST_GROUPED` follows from the last column.
"""

from dataclasses import dataclass, field

import torch
from harness import DTYPES, finish, median_and_spread, median_ratio, take_turns
from transformers import HfArgumentParser

from neobert_hf import NeoBERTConfig, tune_allocator
from neobert_hf.model.attention_neobert import group_by_length
from neobert_hf.model.layout_neobert import Boundaries
from neobert_hf.model.plan_neobert import make_plan

LENGTHS = {"6 to 30": (6, 30), "30 to 128": (30, 128), "128": (128, 128), "512": (512, 512), "1,024": (1024, 1024)}


@dataclass
class TrainingAttentionArguments:
    """Arguments of the benchmark."""

    num_tokens: int = field(default=4096, metadata={"help": "Tokens in a row, about."})
    num_heads: int = field(default=4, metadata={"help": "Heads of width 64."})
    num_rounds: int = field(default=15, metadata={"help": "Turns of each."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def sequence_lengths(shortest: int, longest: int, num_tokens: int) -> list[int]:
    """Lengths between two bounds, of `num_tokens` tokens in all at least."""
    generator, lengths = torch.Generator().manual_seed(0), []
    while sum(lengths) < num_tokens:
        lengths.append(int(torch.randint(shortest, longest + 1, (), generator=generator)))
    return lengths


def main():
    """Measure every set of lengths in both dtypes."""
    (arguments,) = HfArgumentParser(TrainingAttentionArguments).parse_args_into_dataclasses()
    tune_allocator()
    rows = []
    for dtype in ("bfloat16", "float32"):
        for name, bounds in LENGTHS.items():
            lengths = sequence_lengths(*bounds, arguments.num_tokens)
            boundaries = torch.tensor([0, *lengths]).cumsum(0)
            ids = torch.full((1, sum(lengths)), 5)
            config = NeoBERTConfig(vocab_size=10, attn_implementation="sdpa")
            plan = make_plan(ids, config, Boundaries(cu_seq_lens={"cu_seq_lens_q": boundaries}))
            shape = sum(lengths), arguments.num_heads, 64
            q, k, v, grad = (torch.randn(shape, dtype=DTYPES[dtype], requires_grad=i < 3) for i in range(4))

            def step(mask, plan=plan, inputs=(q, k, v), grad=grad):
                output, _ = plan._replace(mask=mask).attend(*inputs)
                output.backward(grad)

            groups = group_by_length(plan.layout)
            runs = {"one call per sequence": lambda: step(None), "groups": lambda groups=groups: step(groups)}
            seconds = take_turns(runs, arguments.num_rounds, "cpu", f"{dtype}, {name}")
            for run, each in seconds.items():
                median, spread = median_and_spread(each)
                ratio = median_ratio(seconds["one call per sequence"], each)
                what = dict(dtype=dtype, lengths=name, attention=run)
                rows.append({**what, "ms": median * 1e3, "spread": spread, "speed": ratio})
    finish("training_attention", rows, arguments)


if __name__ == "__main__":
    main()
