"""Pretrain a small NeoBERT on the documentation inside this machine's Python, then use it like any model from the Hub.

python examples/demo_documentation.py --output_dir runs/demo        (about four minutes on two cores; `make demo-train`)
python examples/demo_documentation.py --max_steps 200               (a short test)
"""

import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from documentation_search.masked_accuracy import masked_accuracy
from transformers import Trainer, TrainingArguments, set_seed

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, PackedMLMCollator, tune_allocator
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.demo.documentation import collect_documentation
from neobert_hf.runs.arguments import PrecisionArguments
from neobert_hf.runs.commands import Bounds, CommandParser, run_command

USE = Path(__file__).with_name("use_saved_model.py")


@dataclass
class DemoArguments:
    """Data and size of the model."""

    num_held_out: Annotated[int, Bounds(1, 1 << 20)] = field(
        default=500, metadata={"help": "Number of documents held out for evaluation."}
    )
    num_searched: Annotated[int, Bounds(3, 1 << 20)] = field(
        default=4000, metadata={"help": "Number of documents to search at the end."}
    )
    max_length: Annotated[int, Bounds(3, 512)] = field(
        default=128, metadata={"help": "Maximum length of a document in tokens."}
    )
    vocab_size: Annotated[int, Bounds(300, 1 << 17)] = field(
        default=8192, metadata={"help": "Size of the WordPiece vocabulary."}
    )
    hidden_size: Annotated[int, Bounds(64, 1 << 13)] = field(
        default=256, metadata={"help": "Width of the model, a multiple of 64."}
    )
    num_hidden_layers: Annotated[int, Bounds(1, 256)] = field(default=3, metadata={"help": "Number of blocks."})

    def __post_init__(self):
        if self.hidden_size % 64:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of 64, the width of a head; choose a multiple"
            )


@dataclass
class DemoTrainingArguments(PrecisionArguments, TrainingArguments):
    """Training: defaults for about four minutes on two cores."""

    GROUPS: ClassVar = {
        None: ("max_grad_norm", "adam_beta2", "dataloader_pin_memory", "save_strategy", "report_to", "auto_precision")
    }

    output_dir: str = "runs/demo"
    auto_precision: bool = True
    max_steps: int = 1000
    per_device_train_batch_size: int = 16
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    lr_scheduler_type: str = "cosine"
    adam_beta2: float = 0.95  # the paper's
    max_grad_norm: float = 1.0
    logging_steps: int = 50
    dataloader_pin_memory: bool = False
    save_strategy: str = "no"
    report_to: str = "none"


def run(demo: DemoArguments, training: DemoTrainingArguments):
    """Run the demo."""
    set_seed(training.seed)
    tune_allocator()
    output_dir = Path(training.output_dir)

    print("1. Documentation of this Python")
    entries = collect_documentation()
    random.Random(training.seed).shuffle(entries)
    texts = [entry.full_text for entry in entries]
    print(f"   {len(entries):,} entries, {sum(map(len, texts)) / 1e6:.0f} MB of text")
    if demo.num_held_out >= len(entries):
        raise ValueError(
            f"num_held_out={demo.num_held_out} leaves no entry of {len(entries)} to train on; hold out fewer"
        )

    print("2. A WordPiece tokenizer")
    held_out, training_texts = texts[: demo.num_held_out], texts[demo.num_held_out :]
    tokenizer = train_wordpiece(training_texts[:20_000], demo.vocab_size, model_max_length=512)
    num_documents = training.max_steps * training.train_batch_size * training.gradient_accumulation_steps
    training_ids, held_out_ids = (
        tokenizer(part, truncation=True, max_length=demo.max_length)["input_ids"]
        for part in (training_texts[:num_documents], held_out)
    )
    tokenizer.backend_tokenizer.no_truncation()  # otherwise the saved tokenizer would truncate too
    print(f"   {len(tokenizer):,} tokens; {sum(map(len, training_ids)) / 1e6:.1f} M tokens to train on")

    collator = PackedMLMCollator(tokenizer, seed=training.seed)
    batches = [
        collator([{"input_ids": ids} for ids in held_out_ids[i : i + 32]]) for i in range(0, len(held_out_ids), 32)
    ]
    model = NeoBERTForMaskedLM(
        NeoBERTConfig(
            vocab_size=len(tokenizer),
            hidden_size=demo.hidden_size,
            num_hidden_layers=demo.num_hidden_layers,
            num_attention_heads=demo.hidden_size // 64,
            intermediate_size=4 * demo.hidden_size,
            max_position_embeddings=512,
            decoder_init_range=demo.hidden_size
            ** -0.5,  # the paper's 0.02 is for width 768; narrower models need a larger value
            sparse_prediction=True,  # the decoder runs on masked positions only
        )
    )
    accuracy = {
        "before training": masked_accuracy(model, batches),
    }

    print(f"3. Pretraining {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, packed")
    trainer = Trainer(
        model,
        training,
        train_dataset=[{"input_ids": ids} for ids in training_ids],
        data_collator=PackedMLMCollator(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    accuracy["after training"] = masked_accuracy(model, batches)

    print(f"   masked tokens predicted correctly in {len(held_out)} held-out documents:")
    for when, share in accuracy.items():
        print(f"   {when:>20}  {share:6.1%}")

    model.config.sparse_prediction = False
    trainer.save_model(output_dir)
    searchable = [asdict(entry) for entry in entries[: demo.num_searched]]
    (output_dir / "entries.json").write_text(json.dumps(searchable), "utf-8")
    metrics = {
        "num_held_out": len(held_out),
        "num_training_tokens": sum(map(len, training_ids)),
        "masked_accuracy": accuracy,
    }
    (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2), "utf-8")

    print(f"4. Loading {output_dir} in a clean process, with the code saved next to the weights", flush=True)
    subprocess.run([sys.executable, "-I", USE, output_dir], check=True)


def main():
    """Read the command line, and run."""
    classes = (DemoArguments, DemoTrainingArguments)
    parser = CommandParser(classes, description=__doc__)
    run_command(parser.prog, run, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
