"""The last block of NeoBERT, computed for the tokens that a head reads, and for all tokens.

    python benchmarks/selected_tokens.py --json benchmarks/results/selected_tokens_cpu_float32.json

A hook on the last block makes the model compute all of its tokens. Both run in turns: classification reads the first token of a
sequence, masked-language training 20 % of the tokens. Ragged sequences of 8 to 128 tokens, packed into one row; random weights.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from harness import DTYPES, finish, median_and_spread, median_ratio, take_turns
from tqdm.auto import tqdm
from transformers import AutoConfig, HfArgumentParser

import neobert_hf
from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    best_dtype,
    tune_allocator,
)

TASKS = {
    "classification, inference": (NeoBERTForSequenceClassification, False),
    "classification, training": (NeoBERTForSequenceClassification, True),
    "masked tokens, training": (NeoBERTForMaskedLM, True),
}


@dataclass
class SelectedTokensArguments:
    """Arguments of the benchmark."""

    num_tokens: int = field(default=4096, metadata={"help": "Tokens in a batch, about."})
    dtype: str = field(default=None, metadata={"help": "Of the products. Default: the fastest on this machine."})
    shapes: list[str] = field(
        default_factory=lambda: ["mini", "neobert"],
        metadata={"help": "mini, or neobert: the published shape."},
    )
    device: str = field(default="cpu", metadata={"help": "cpu or cuda."})
    num_rounds: int = field(default=5, metadata={"help": "Turns of each; the mini shape makes four times as many."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def packed_batch(num_tokens: int, vocab_size: int, device: str) -> tuple[dict, torch.Tensor]:
    """Return a packed row of sequences of 8 to 128 tokens, and the labels of one in five tokens."""
    generator, lengths = torch.Generator().manual_seed(0), []
    while sum(lengths) < num_tokens:
        lengths.append(int(torch.randint(8, 129, (), generator=generator)))
    ids = torch.randint(5, vocab_size, (1, sum(lengths)), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) >= 0.2, -100)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"input_ids": ids.to(device), "cu_seq_lens_q": boundaries.to(device)}, labels.to(device)


def main():
    """Measure every task and shape, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(SelectedTokensArguments).parse_args_into_dataclasses()
    arguments.dtype = arguments.dtype or str(best_dtype(arguments.device)).removeprefix("torch.")
    if arguments.device == "cpu":
        tune_allocator()
    dtype, rows = DTYPES[arguments.dtype], []
    for shape in arguments.shapes:
        config = NeoBERTConfig() if shape == "neobert" else AutoConfig.from_pretrained(neobert_hf.MINI_MODEL_PATH)
        config.sparse_prediction = True
        inputs, labels = packed_batch(arguments.num_tokens, config.vocab_size, arguments.device)
        for task, (model_class, trains) in tqdm(TASKS.items(), desc=shape, unit=" tasks"):
            model = model_class(config).to(arguments.device).train(trains)
            if not trains:
                model.to(dtype)
            wanted = (
                labels if model_class is NeoBERTForMaskedLM else torch.zeros_like(inputs["cu_seq_lens_q"][1:]).long()
            )

            def step(reads_all, model=model, inputs=inputs, labels=wanted, trains=trains):
                block = model.model.transformer_encoder[-1]
                hook = block.register_forward_hook(lambda *_: None) if reads_all else None
                if trains:
                    is_half = dtype != torch.float32
                    with torch.autocast(arguments.device, dtype) if is_half else nullcontext():
                        loss = model(**inputs, labels=labels).loss
                    loss.backward()
                    model.zero_grad()
                else:
                    with torch.inference_mode():
                        model(**inputs)
                if hook is not None:
                    hook.remove()

            runs = {"all tokens": lambda: step(True), "what the head reads": lambda: step(False)}
            num_rounds = arguments.num_rounds * (4 if shape == "mini" else 1)
            seconds = take_turns(runs, num_rounds, arguments.device, f"{shape}, {task}")
            for name, each in seconds.items():
                median, spread = median_and_spread(each)
                rows.append(
                    {
                        "shape": shape,
                        "task": task,
                        "last_block": name,
                        "tokens_per_s": inputs["input_ids"].numel() / median,
                        "spread": spread,
                        "speed": median_ratio(seconds["all tokens"], each),
                    }
                )
    finish("selected_tokens", rows, arguments)


if __name__ == "__main__":
    main()
