"""Train a NeoBERT to embed texts, by contrastive learning and sentence-transformers' trainer.

Pairs of your own, in columns of .jsonl, .csv or .parquet files; a short run of the mini model on a CPU:

    neobert train-contrastive --train_files pairs.jsonl --output_dir runs/small-embeddings \\
        --max_steps 100 --per_device_train_batch_size 64 --learning_rate 1e-4 --warmup_steps 10

The paper's training sets and instructions have a script of their own, in a checkout (examples/paper/embeddings/README.md).

Rerun the command to resume exactly after an interruption.
"""

import torch

from neobert_hf.checkpoints import write_card
from neobert_hf.embeddings import (
    ContrastiveArguments,
    ContrastiveTrainingArguments,
    mine_negatives,
    open_embedding_model,
    open_sets,
    sentence_transformer,
    train_contrastive,
)
from neobert_hf.finetuning import say_saved
from neobert_hf.runs import run_script


def train(arguments: ContrastiveArguments, training: ContrastiveTrainingArguments):
    """Train, save, evaluate before and after, and write the card."""
    # 1. Model
    name, options = arguments.model_name_or_path, {"dtype": torch.float32}  # bf16 is the dtype of the computation
    if arguments.pooling:
        model = sentence_transformer(name, arguments.pooling, model_kwargs=options)
    else:  # the pooling of a saved model, or the mean for a bare NeoBERT
        model = open_embedding_model(name, model_kwargs=options)
    model.max_seq_length = arguments.max_seq_length or min(model.max_seq_length, 512)

    # 2. Data
    sets, held_out = open_sets(arguments, training.seed)
    if arguments.num_mined_negatives:
        sets = mine_negatives(sets, model, arguments.num_mined_negatives)
    for set_name, rows in sets.items():
        print(f"{set_name}: {len(rows):,} rows of {', '.join(rows.column_names)}", flush=True)
    for set_name, rows in held_out.items():
        print(f"{set_name}: {len(rows):,} pairs to evaluate on", flush=True)

    # 3. Training
    train_contrastive(model, sets, training, arguments, held_out)
    if training.should_save:
        write_card(training.output_dir)
        say_saved(training.output_dir)


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
