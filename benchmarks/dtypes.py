"""bfloat16 beside float32 on this machine: inference and one training step of NeoBERT.

    python benchmarks/dtypes.py --json benchmarks/results/dtypes_cpu.json

The published shape with random weights. Both dtypes run in turns. The row of a training step counts forward and backward of
masked-language modelling, with autocast in bfloat16.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from harness import DTYPES, build, finish, median_and_spread, median_ratio, take_turns
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from neobert_hf import tune_allocator


@dataclass
class DtypesArguments:
    """Arguments of the benchmark."""

    shapes: list[str] = field(
        default_factory=lambda: ["1x12", "1x128", "8x128", "4x512", "1x2048"],
        metadata={"help": "Sequences x tokens of each, in inference."},
    )
    training_shape: str = field(default="8x128", metadata={"help": "Sequences x tokens of a training step."})
    num_layers: int = field(default=None, metadata={"help": "Number of layers. Default: 28, the published shape."})
    num_rounds: int = field(default=5, metadata={"help": "Turns of each dtype."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def random_ids(shape: str) -> torch.Tensor:
    """Random token ids, (sequences, tokens), of a shape such as "8x128"."""
    return torch.randint(5, 30000, tuple(map(int, shape.split("x"))), generator=torch.Generator().manual_seed(0))


def training_step(model: torch.nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> None:
    """Forward and backward; every token is a label."""
    with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
        loss = model(ids, labels=ids).loss
    loss.backward()
    model.zero_grad()


def main():
    """Measure every shape, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(DtypesArguments).parse_args_into_dataclasses()
    tune_allocator()
    dtypes, rows = {name: DTYPES[name] for name in ("float32", "bfloat16")}, []
    longest = max(int(shape.split("x")[1]) for shape in [*arguments.shapes, arguments.training_shape])
    models = {name: build("ours", dtype, "cpu", longest, arguments.num_layers) for name, dtype in dtypes.items()}
    trained = build("ours", torch.float32, "cpu", longest, arguments.num_layers, head=True).train()

    def forward(name, ids):
        with torch.inference_mode():
            models[name](ids)

    cases = [("inference", shape) for shape in arguments.shapes] + [("training step", arguments.training_shape)]
    for task, shape in tqdm(cases, desc="shapes", unit=" shapes"):
        ids = random_ids(shape)
        if task == "inference":
            runs = {name: lambda name=name, ids=ids: forward(name, ids) for name in dtypes}
        else:
            runs = {
                name: lambda dtype=dtype, ids=ids: training_step(trained, ids, dtype) for name, dtype in dtypes.items()
            }
        seconds = take_turns(runs, arguments.num_rounds, "cpu", f"{task}, {shape}")
        for name, each in seconds.items():
            median, spread = median_and_spread(each)
            speed = median_ratio(seconds["float32"], each)
            row = {"task": task, "shape": shape, "dtype": name, "tokens_per_s": ids.numel() / median, "spread": spread}
            rows.append(row | {"speed_over_float32": speed})
    finish("dtypes", rows, arguments)


if __name__ == "__main__":
    main()
