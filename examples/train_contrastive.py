"""Train a NeoBERT to embed texts, by the paper's contrastive learning (section 5.2.1) and sentence-transformers' trainer.

The paper's training sets:

    python examples/train_contrastive.py --model_name_or_path chandar-lab/NeoBERT --output_dir runs/embeddings --bf16 \\
        --mini_batch_size 32

A short run on pairs from the documentation inside this Python:

    python examples/documentation_search/corpus.py --output_dir runs/documentation
    python examples/train_contrastive.py --model_name_or_path runs/small --output_dir runs/small-embeddings --use_cpu \\
        --train_files runs/documentation/train_pairs.jsonl --validation_files runs/documentation/held_out_pairs.jsonl \\
        --max_seq_length 128 --max_steps 100 --per_device_train_batch_size 64 --learning_rate 5e-4 --warmup_steps 10

After an interruption, the same command with `--resume_from_checkpoint last` resumes exactly.
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
    set_sampling,
)
from neobert_hf.embeddings.models import open_embedding_model
from neobert_hf.embeddings.training import start_files, train_and_summarize
from neobert_hf.evaluation.retrieval import pairs_evaluators
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.folders import lock_run

FULL_PRECISION = {"dtype": torch.float32}  # of the weights; --bf16 sets the dtype of the computation


def train(arguments: ContrastiveArguments, training: ContrastiveTrainingArguments):
    """Train, save, evaluate, and write a summary."""
    if training.device.type == "cpu":
        tune_allocator()
    set_sampling(training, arguments.sampling_exponent, arguments.gather_across_devices)

    if arguments.pooling:
        model = sentence_transformer(arguments.model_name_or_path, arguments.pooling, model_kwargs=FULL_PRECISION)
    else:  # the pooling of a saved model, or the mean for a bare NeoBERT
        model = open_embedding_model(arguments.model_name_or_path, model_kwargs=FULL_PRECISION)
    model.max_seq_length = arguments.max_seq_length or min(model.max_seq_length, 512)

    sides = arguments.instruction_sides
    evaluators = pairs_evaluators(arguments.validation_files or ())
    sets, prompts = open_training_sets(arguments, training.seed)
    if arguments.num_mined_negatives:
        sets = mine_negatives(sets, prompts, model, arguments.num_mined_negatives, sides)
    training.prompts = column_prompts(sets, prompts, sides)
    for name, rows in sets.items():
        print(f"{name}: {len(rows):,} rows of {', '.join(rows.column_names)}; prompt {prompts.get(name)!r}", flush=True)
    if (
        len(prompts) == len(sets) and len(set(prompts.values())) == 1
    ):  # one instruction for all sets: the model keeps it
        (prompt,) = set(prompts.values())
        model.prompts = {"query": prompt, "document": prompt if sides == "both" else ""}
    values = {name: value for name, value in asdict(arguments).items() if name != "validation_files"}
    names = ("temperature", "mini_batch_size", "gather_across_devices")
    loss = contrastive_loss(model, **{name: values[name] for name in names})
    train_and_summarize(
        lambda _: ContrastiveTrainer(model, training, train_dataset=sets, loss=loss, evaluator=evaluators or None),
        training,
        values | {"max_seq_length": model.max_seq_length},
        files=[
            *(arguments.train_files or ()),
            *filter(None, [arguments.instructions]),
            *start_files(arguments.model_name_or_path),
        ],
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
    classes = (ContrastiveArguments, ContrastiveTrainingArguments)
    parser = CommandParser(classes, description=__doc__)
    run_command(parser.prog, train_alone, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
