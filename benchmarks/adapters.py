"""A training step of LoRA beside one of all weights: time, peak memory, and the size of what is saved.

    python benchmarks/adapters.py --json benchmarks/results/adapters_cpu.json

A classifier in float32 with AdamW, on texts of one length, with random weights: the shape of the mini model, and the published
shape. Both kinds of training take turns; the memory of each is measured in a process of its own.
"""

import torch
from harness import finish, in_new_process, median_and_spread, median_ratio, read_arguments, take_turns
from memory import peak_of
from peft import get_peft_model

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForSequenceClassification, lora_config

SHAPES = {"mini": lambda: NeoBERTConfig.from_pretrained(neobert_hf.MINI_MODEL_PATH), "NeoBERT": NeoBERTConfig}


def training_step(shape: str, kind: str, arguments):
    """Return the model, and a function that makes a training step."""
    torch.manual_seed(0)
    model = NeoBERTForSequenceClassification(SHAPES[shape]()).train()
    if kind == "LoRA":
        model = get_peft_model(model, lora_config("SEQ_CLS", r=arguments.rank, lora_alpha=2 * arguments.rank))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], 1e-5)
    ids = torch.randint(5, 10_000, (arguments.batch, arguments.length))
    labels = torch.arange(arguments.batch) % 2

    def step() -> None:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def peak_mb(shape: str, kind: str, arguments) -> float:
    """Peak memory of two steps; the second has the optimizer's state."""
    _, step = training_step(shape, kind, arguments)
    return peak_of(lambda: [step(), step()], "cpu")[0]


def main() -> None:
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(__doc__, shapes=list(SHAPES), rank=16, batch=8, length=128, num_rounds=3)
    rows = []
    for shape in arguments.shapes:
        kinds = {kind: training_step(shape, kind, arguments) for kind in ("all weights", "LoRA")}
        runs = {kind: step for kind, (_, step) in kinds.items()}
        seconds = take_turns(runs, arguments.num_rounds, "cpu", shape)
        trained = {
            kind: sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
            for kind, (model, _) in kinds.items()
        }
        del kinds, runs
        for kind in seconds:
            median, spread = median_and_spread(seconds[kind])
            rows.append(
                {
                    "model": shape,
                    "trained": kind,
                    "trained_weights": trained[kind],
                    "saved_mb": trained[kind] * 4 / 2**20,
                    "peak_mb": in_new_process(peak_mb, shape, kind, arguments),
                    "milliseconds": median * 1000,
                    "spread": spread,
                    "times_of_all": median_ratio(seconds["all weights"], seconds[kind]),
                }
            )
    finish("adapters", rows, arguments)


if __name__ == "__main__":
    main()
