"""The paper's ablations (Table 2, Figure 1) at a scale that two cores can train, on the documentation inside this Python.

    python benchmarks/ablations.py --json benchmarks/results/ablations_cpu.json              (80 minutes)
    python benchmarks/ablations.py --num_steps 20 --seeds 0 --variants M0 M1                  (a quick run)

Each variant is its recipe with a small shape. All variants train on the same documents, with the same number of tokens and one
learning rate, because the paper's belongs to another scale. M7 is wide; M8 is deep and narrow, with 3 % fewer parameters. All
are evaluated on the same held-out documents with the same masks: 20 % of the tokens become `[MASK]`. The paper evaluated on
GLUE, so only directions are comparable.
"""

import statistics
import tempfile
from dataclasses import dataclass, field

import numpy as np
from docstrings import read  # examples/documentation_search
from harness import finish
from tqdm.auto import tqdm
from transformers import HfArgumentParser, set_seed

from neobert_hf import PackedMLMCollator, tune_allocator
from neobert_hf.data.packing import PackedRows
from neobert_hf.data.plans import PackingSettings, make_packing_plan
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.pretraining.arguments import PretrainingArguments
from neobert_hf.pretraining.pretrain import build_model
from neobert_hf.pretraining.trainer import PretrainingTrainer

BASE = dict(hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768)
UNTIED = "tie_word_embeddings=false"  # as NeoBERT
SHAPES = {
    "M0": BASE,
    "M1": BASE,
    "M5": BASE,
    "M6": BASE,
    "M7": dict(BASE, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024),
    "M8": dict(BASE, num_hidden_layers=9),
}


@dataclass
class AblationArguments:
    """Arguments of the benchmark."""

    variants: list[str] = field(
        default_factory=lambda: list(SHAPES), metadata={"help": f"Variants: {', '.join(SHAPES)}."}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds of weights, order and masks."})
    num_steps: int = field(default=300, metadata={"help": "Optimizer steps of each run."})
    tokens_per_step: int = field(default=8192, metadata={"help": "Tokens in an optimizer step."})
    row_tokens: int = field(default=2048, metadata={"help": "Tokens of a row; M6 attends to all of it."})
    learning_rate: float = field(default=1.5e-3, metadata={"help": "Peak learning rate of every variant."})
    max_length: int = field(default=128, metadata={"help": "Length in tokens at which documents are truncated."})
    num_held_out: int = field(default=1000, metadata={"help": "Documents to evaluate on."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def train(variant: str, seed: int, tokenizer, training_ids, held_out_ids, arguments, folder) -> dict:
    """Train one variant from one seed; returns its size, tokens, held-out loss and accuracy."""
    args = PretrainingArguments(
        output_dir=folder,
        recipe=variant.lower(),
        use_cpu=arguments.device == "cpu",
        bf16=True,
        max_steps=arguments.num_steps,
        warmup_steps=arguments.num_steps // 10,
        learning_rate=arguments.learning_rate,
        tokens_per_step=arguments.tokens_per_step,
        row_tokens=arguments.row_tokens,
        max_length=arguments.max_length,
        logging_steps=arguments.num_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    recipe = args.to_recipe()
    set_seed(seed)
    overrides = ",".join(f"{name}={value}" for name, value in SHAPES[variant].items())
    model = build_model(recipe, tokenizer, f"{overrides},{UNTIED}" if variant == "M0" else overrides)
    masking = dict(mlm_probability=recipe.mlm_probability, mask_replace_prob=recipe.mask_replace_prob)
    collator = PackedMLMCollator(
        tokenizer, random_replace_prob=recipe.random_replace_prob, batch_format=recipe.batch_format, **masking
    )

    def packed(documents, seed, num_rows=None):
        settings = PackingSettings(args.row_tokens, args.max_length, seed=seed)
        return PackedRows(documents, make_packing_plan(list(map(len, documents)), settings), num_rows)

    rows = packed(training_ids, seed, args.max_steps * args.rows_per_step)
    trainer = PretrainingTrainer(model, args, recipe=recipe, train_dataset=rows, data_collator=collator)
    trainer.train()
    batch_format = "padded" if recipe.architecture != "neobert" else "packed"
    trainer.data_collator = PackedMLMCollator(tokenizer, batch_format=batch_format)  # the same masks for all
    metrics = trainer.evaluate(packed(held_out_ids, seed=1234))
    figures = next(entry for entry in trainer.state.log_history if "num_tokens" in entry)
    return {
        "variant": variant,
        "seed": seed,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_tokens": figures["num_tokens"],
        "tokens_per_s": figures["tokens_per_s"],
        "loss": metrics["eval_loss"],
        "masked_accuracy": metrics["eval_masked_accuracy"],
    }


def main():
    """Train every variant, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(AblationArguments).parse_args_into_dataclasses()
    if arguments.device == "cpu":
        tune_allocator()
    texts = [entry.full_text for entry in read()]
    order = np.random.default_rng(0).permutation(len(texts)).tolist()
    tokenizer = train_wordpiece([texts[i] for i in order[arguments.num_held_out :]], vocab_size=8192)
    ids = tokenizer([texts[i] for i in order], truncation=True, max_length=arguments.max_length)["input_ids"]
    held_out_ids, training_ids = ids[: arguments.num_held_out], ids[arguments.num_held_out :]
    runs = []
    cases = [(variant, seed) for seed in arguments.seeds for variant in arguments.variants]
    for variant, seed in tqdm(cases, desc="training", unit=" runs"):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(train(variant, seed, tokenizer, training_ids, held_out_ids, arguments, folder))
    rows = []
    for variant in arguments.variants:
        own = [run for run in runs if run["variant"] == variant]
        row = {"variant": variant, "num_parameters": own[0]["num_parameters"], "num_tokens": own[0]["num_tokens"]}
        for name in ("loss", "masked_accuracy"):
            values = [run[name] for run in own]
            row |= {name: statistics.mean(values), f"{name}_spread": (max(values) - min(values)) / 2}
        rows.append(row)
    finish("ablations", rows, arguments, floatfmt=".4g", runs=runs)


if __name__ == "__main__":
    main()
