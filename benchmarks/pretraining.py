"""Overhead of pretraining: Trainer against a bare training step, and `neobert tokenize` against `tokenizers`.

    python benchmarks/pretraining.py --json benchmarks/results/pretraining_cpu.json

The bare step is that of ragged.py: collate, forward and backward under autocast, AdamW. Trainer runs the same rows and adds what
`examples/pretrain_mlm.py` has: schedule, clipping, counting, a log every tenth step, a checkpoint at the end. Tokenizing is
`neobert tokenize` on the docstrings of Python's standard library, from a file, with checksums and manifest; `tokenizers` alone is
its `encode_batch_fast` on the same texts in memory, on all cores. They run in turns.
"""

import json
import os
import tempfile
import time
from pathlib import Path

import torch
from harness import DTYPES, docstrings, finish, median_and_spread, median_ratio, read_arguments, take_turns

from neobert_hf import PackedMLMCollator, tune_allocator
from neobert_hf.data import plain_tokenizer, train_wordpiece
from neobert_hf.pretraining import (
    Corpus,
    PackedRows,
    PackingSettings,
    PretrainingArguments,
    PretrainingTrainer,
    build_model,
    make_packing_plan,
    tokenize,
)


def training(tokenizer, documents, arguments, folder) -> dict:
    """Functions that train on the same rows, by Trainer and by the bare step, and the number of tokens."""
    args = PretrainingArguments(
        output_dir=folder,
        use_cpu=arguments.device == "cpu",
        bf16=arguments.dtype == "bfloat16",
        max_steps=arguments.num_steps,
        max_length=arguments.max_length,
        row_tokens=arguments.row_tokens,
        tokens_per_step=arguments.tokens_per_step,
        learning_rate=1e-5,
        logging_steps=10,
        save_steps=arguments.num_steps,
        report_to="none",
        disable_tqdm=True,
    )
    num_rows = args.max_steps * args.rows_per_step
    plan = make_packing_plan(list(map(len, documents)), PackingSettings(args.row_tokens, args.max_length))
    rows = PackedRows(documents, plan, num_rows)
    collator = PackedMLMCollator(tokenizer)

    def with_trainer():
        model = build_model(args.to_recipe(), tokenizer, arguments.config)
        trainer = PretrainingTrainer(
            model, args, recipe=args.to_recipe(), train_dataset=rows, data_collator=collator, processing_class=tokenizer
        )
        trainer.train()
        return trainer.state.log_history[-1]["train_runtime"]

    def bare():
        model = build_model(args.to_recipe(), tokenizer, arguments.config).to(arguments.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        dtype = DTYPES[arguments.dtype]
        started = time.perf_counter()
        for number in range(num_rows):
            batch = {name: value.to(arguments.device) for name, value in collator([rows[number]]).items()}
            with torch.autocast(arguments.device, dtype, enabled=dtype != torch.float32):
                loss = model(**batch).loss
            (loss / args.rows_per_step).backward()
            if (number + 1) % args.rows_per_step == 0:
                optimizer.step()
                optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - started

    num_tokens = sum(len(rows[number]["input_ids"]) for number in range(num_rows))
    return {"runs": {"Trainer": with_trainer, "bare step": bare}, "amount": num_tokens, "unit": "tokens"}


def tokenizing(tokenizer, texts, arguments) -> dict:
    """Functions that tokenize the same texts: from a file into a folder of documents, and by the library in memory."""

    def ours():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "texts.jsonl")
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            started = time.perf_counter()
            tokenize(Corpus([file]), tokenizer, Path(folder, "documents"), workers=arguments.num_processes)
            return time.perf_counter() - started

    raw = plain_tokenizer(tokenizer)

    def library():
        started = time.perf_counter()
        for start in range(0, len(texts), 10_000):
            raw.encode_batch_fast(texts[start : start + 10_000])
        return time.perf_counter() - started

    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return {"runs": {"neobert tokenize": ours, "tokenizers": library}, "amount": megabytes, "unit": "MB"}


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        config="num_hidden_layers=6",
        num_steps=10,
        num_rounds=3,
        row_tokens=2048,
        tokens_per_step=4096,
        max_length=512,
        num_processes=2,
        dtype="bfloat16",
        device="cpu",
    )
    if arguments.device == "cpu":
        tune_allocator()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    texts = docstrings()
    tokenizer = train_wordpiece(texts[::5], vocab_size=8192)
    ids = tokenizer(texts[::3], truncation=True, max_length=arguments.max_length)["input_ids"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "tokenizing": tokenizing(tokenizer, texts, arguments),
            "training": training(tokenizer, ids, arguments, str(Path(folder, "run"))),
        }
        for what, case in cases.items():
            seconds = take_turns(case["runs"], arguments.num_rounds, arguments.device, what)
            ours = next(iter(seconds.values()))
            for name, runs in seconds.items():
                median, spread = median_and_spread(runs)
                row = {"what": what, "contender": name, "per_s": case["amount"] / median, "unit": case["unit"]}
                rows.append(row | {"spread": spread, "ours_over_it": median_ratio(runs, ours)})
    finish("pretraining", rows, arguments)


if __name__ == "__main__":
    main()
