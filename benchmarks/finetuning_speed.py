"""Speed of fine-tuning on GLUE with stock Trainer and stock collator: without padding, and with padded attention.

    python benchmarks/finetuning_speed.py --data_dir glue --json benchmarks/results/finetuning_speed_cpu.json

Both train the same model on the same batches, in turns. The model `neobert` is the published shape with
random weights and makes a tenth of the steps. Speed counts tokens of text, and not padding.
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from harness import finish, median_and_spread, median_ratio, read_arguments, take_turns
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
from transformers.utils import logging

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForSequenceClassification, best_dtype, tune_allocator

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/paper"))
from glue import TASKS, load_task


def load(name: str, num_labels: int, unpad: bool):
    """Return a classifier that removes padding, or computes it."""
    torch.manual_seed(0)
    if name == "neobert":
        return NeoBERTForSequenceClassification(NeoBERTConfig(num_labels=num_labels, unpad_inputs=unpad))
    options = {"dtype": torch.float32, "unpad_inputs": unpad, "num_labels": num_labels}
    return AutoModelForSequenceClassification.from_pretrained(name, **options)


def seconds_of_training(model, rows, tokenizer, num_steps: int, batch_size: int) -> float:
    """Return the time of some steps of the stock Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
        training = TrainingArguments(
            folder,
            max_steps=num_steps,
            per_device_train_batch_size=batch_size,
            bf16=best_dtype("cpu") == torch.bfloat16,
            use_cpu=True,
            **options,
        )
        trainer = Trainer(model, training, train_dataset=rows, processing_class=tokenizer)
        started = time.perf_counter()
        trainer.train()
        return time.perf_counter() - started


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        data_dir="glue",
        models=[neobert_hf.MINI_MODEL_PATH, "neobert"],
        tasks=["sst2", "stsb"],
        batch_size=32,
        num_steps=40,
        num_rounds=3,
    )
    tune_allocator()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(neobert_hf.MINI_MODEL_PATH)
    rows = []
    for name in arguments.models:
        num_steps = arguments.num_steps if name != "neobert" else max(1, arguments.num_steps // 10)
        for task in map(TASKS.get, arguments.tasks):
            data = load_task(task, arguments.data_dir)["train"]
            data = data.shuffle(seed=0).select(range(num_steps * arguments.batch_size))
            tokens = tokenizer(*(list(data[column]) for column in task.texts), truncation=True, max_length=512)
            lengths = list(map(len, tokens["input_ids"]))
            data = data.add_column("input_ids", tokens["input_ids"]).remove_columns(list(task.texts))
            num_labels = len(task.classes or ["score"])
            models = {"ours": load(name, num_labels, True), "padded": load(name, num_labels, False)}
            runs = {
                what: partial(seconds_of_training, model, data, tokenizer, num_steps, arguments.batch_size)
                for what, model in models.items()
            }
            seconds = take_turns(runs, arguments.num_rounds, "cpu", task.name)
            median, spread = median_and_spread(seconds["ours"])
            rows.append(
                {
                    "model": "mini" if name == neobert_hf.MINI_MODEL_PATH else name,
                    "task": task.name,
                    "mean_length": sum(lengths) / len(lengths),
                    "tokens_per_s": sum(lengths) / median,
                    "spread": spread,
                    "speed_over_padded": median_ratio(seconds["padded"], seconds["ours"]),
                }
            )
    arguments.models = list(dict.fromkeys(row["model"] for row in rows))
    finish("finetuning_speed", rows, arguments)


if __name__ == "__main__":
    main()
