"""Pretrain NeoBERT by the paper's recipe: HF Trainer, packed rows, exact resume, one machine or many.

A short run, some minutes on a CPU:

    neobert train-tokenizer --files text.jsonl --output_dir runs/tokenizer
    neobert pretrain-mlm --train_files text.jsonl --tokenizer_name runs/tokenizer \\
        --config_overrides hidden_size=256,num_hidden_layers=3,num_attention_heads=4,intermediate_size=1024 \\
        --output_dir runs/small --max_steps 200 --max_length 256 --row_tokens 4096 --tokens_per_step 4096 \\
        --learning_rate 2e-3 --warmup_steps 20 --use_cpu

Phase 2 of this run, on longer documents; it reuses the tokenized text:

    neobert pretrain-mlm --phase 2 --init_from runs/small --output_dir runs/small-2 \\
        --train_files text.jsonl --tokenizer_name runs/tokenizer --documents_dir runs/small/documents \\
        --max_steps 20 --max_length 1024 --longer_than 256 512 --row_tokens 4096 --tokens_per_step 4096 \\
        --learning_rate 2e-3 --use_cpu

The paper, phases 1 and 2; a checkpoint has 2.9 GB, so the newest three stay. `neobert_hf/examples/accelerate` has ddp.yaml:

    accelerate launch --config_file ddp.yaml -m neobert_hf.examples.pretrain_mlm --bf16 --save_total_limit 3
    accelerate launch --config_file ddp.yaml -m neobert_hf.examples.pretrain_mlm --bf16 \\
        --save_total_limit 3 --phase 2 --init_from runs/pretraining --output_dir runs/pretraining-4096 \\
        --documents_dir runs/pretraining/documents

Rerun the command to resume exactly after an interruption. `--recipe` is `paper`, `code` (the values of the authors' code) or a
YAML file; in a checkout, `examples/paper/recipes` has those of the paper's ablations. Each value has an argument too.
`--max_steps` scales warmup and decay. Phase 2 trains at a tenth of `--learning_rate`, where the schedule of phase 1 ends: give
both phases the same value.
"""

from neobert_hf.checkpoints import write_card
from neobert_hf.pretraining import CorpusArguments, PretrainingArguments, pretrain, say_pretrained
from neobert_hf.runs import run_script


def train(data: CorpusArguments, training: PretrainingArguments):
    """Train by a recipe, and write the model card."""
    trainer = pretrain(data, training)
    if trainer.is_world_process_zero():
        write_card(training.output_dir)
        say_pretrained(training.output_dir)


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
