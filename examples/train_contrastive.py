"""Train a NeoBERT to embed texts, by the paper's contrastive learning (section 5.2.1) and sentence-transformers' trainer.

The paper's training sets:

    python examples/train_contrastive.py --model_name_or_path chandar-lab/NeoBERT --output_dir runs/embeddings --bf16 \\
        --mini_batch_size 32

Pairs of your own, in columns of .jsonl, .csv or .parquet files; a short run of the mini model on a CPU:

    python examples/train_contrastive.py --train_files pairs.jsonl --output_dir runs/small-embeddings \\
        --max_steps 100 --per_device_train_batch_size 64 --learning_rate 1e-4 --warmup_steps 10

Rerun the command with `--resume_from_checkpoint last` to resume exactly after an interruption.
"""

from dataclasses import asdict

import torch

from neobert_hf import sentence_transformer, tune_allocator
from neobert_hf.embeddings.contrastive import (
    ContrastiveArguments,
    ContrastiveTrainer,
    ContrastiveTrainingArguments,
    column_prompts,
    contrastive_loss,
    mine_negatives,
    open_training_sets,
    open_validation_sets,
    set_sampling,
)
from neobert_hf.embeddings.models import open_embedding_model
from neobert_hf.embeddings.retrieval import pairs_evaluators
from neobert_hf.embeddings.training import start_files, train_and_summarize
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.folders import lock_run


def train(arguments: ContrastiveArguments, training: ContrastiveTrainingArguments):
    """Train, save, evaluate, and write a summary."""
    if training.device.type == "cpu":
        tune_allocator()

    # 1. Model
    name = arguments.model_name_or_path
    options = {"dtype": torch.float32}  # of the weights; --bf16 sets the dtype of the computation
    if arguments.pooling:
        model = sentence_transformer(name, arguments.pooling, model_kwargs=options)
    else:  # the pooling of a saved model, or the mean for a bare NeoBERT
        model = open_embedding_model(name, model_kwargs=options)
    model.max_seq_length = arguments.max_seq_length or min(model.max_seq_length, 512)

    # 2. Data
    sides = arguments.instruction_sides
    sets, prompts = open_training_sets(arguments, training.seed)
    sets, held_out = open_validation_sets(arguments, sets, training.seed)
    if arguments.num_mined_negatives:
        sets = mine_negatives(sets, prompts, model, arguments.num_mined_negatives, sides)
    training.prompts = column_prompts(sets, prompts, sides)
    set_sampling(training, arguments.sampling_exponent, arguments.gather_across_devices)
    for set_name, rows in sets.items():
        columns, prompt = ", ".join(rows.column_names), prompts.get(set_name)
        print(f"{set_name}: {len(rows):,} rows of {columns}; prompt {prompt!r}", flush=True)
    for set_name, rows in held_out.items():
        print(f"{set_name}: {len(rows):,} pairs to evaluate on", flush=True)
    if len(prompts) == len(sets) and len(set(prompts.values())) == 1:  # the model keeps the only instruction
        (prompt,) = set(prompts.values())
        model.prompts = {"query": prompt, "document": prompt if sides == "both" else ""}

    # 3. Training
    options = {"mini_batch_size": arguments.mini_batch_size, "gather_across_devices": arguments.gather_across_devices}
    loss = contrastive_loss(model, arguments.temperature, **options)
    evaluators = pairs_evaluators(held_out, prompts, sides)
    identity = {name: value for name, value in asdict(arguments).items() if name != "validation_files"}
    train_and_summarize(
        lambda _: ContrastiveTrainer(model, training, train_dataset=sets, loss=loss, evaluator=evaluators or None),
        training,
        {**identity, "max_seq_length": model.max_seq_length},
        files=[*(arguments.train_files or ()), *filter(None, [arguments.instructions]), *start_files(name)],
        num_rows={name: len(rows) for name, rows in sets.items()},
        evaluators=evaluators,
        shown=("temperature", "sampling_exponent", "max_seq_length"),
    )


def train_alone(arguments: ContrastiveArguments, training: ContrastiveTrainingArguments):
    """Train, and lock the folder against other processes."""
    with lock_run(training.output_dir):
        train(arguments, training)


def main():
    """Read the command line, and train."""
    parser = CommandParser((ContrastiveArguments, ContrastiveTrainingArguments), description=__doc__)
    run_command(parser.prog, train_alone, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
