"""Train a NeoBERT to embed texts, by the paper's contrastive learning (section 5.2.1) and sentence-transformers' trainer.

The paper's training sets:

    python examples/train_contrastive.py --model_name_or_path chandar-lab/NeoBERT --output_dir runs/embeddings --bf16 \\
        --mini_batch_size 32

A short run on pairs from the documentation inside this Python:

    neobert documentation --output_dir runs/documentation
    python examples/train_contrastive.py --model_name_or_path runs/small --output_dir runs/small-embeddings --use_cpu \\
        --train_files runs/documentation/train_pairs.jsonl --validation_files runs/documentation/held_out_pairs.jsonl \\
        --max_seq_length 128 --max_steps 100 --per_device_train_batch_size 64 --learning_rate 5e-4 --warmup_steps 10

After an interruption, the same command with `--resume_from_checkpoint last` resumes exactly.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

from neobert_hf import sentence_transformer, tune_allocator
from neobert_hf.commands import CommandParser, run_command
from neobert_hf.data.files import file_hash, saving, write_json
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
from neobert_hf.embeddings.training_sets import read_pairs
from neobert_hf.evaluation.retrieval import pairs_evaluator
from neobert_hf.pretraining.manifests import STILL_GOOD
from neobert_hf.pretraining.runs import begin_or_resume, lock_run

# Arguments that determine the loss curve; a resumed run must have the same values.
CURVE = (
    *("max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm"),
    *("batch_sampler", "bf16", "fp16", "seed"),
)
FULL_PRECISION = {"dtype": torch.float32}  # of the weights; --bf16 sets the dtype of the computation


def train(arguments: ContrastiveArguments, training: ContrastiveTrainingArguments):
    """Train, save, evaluate, and write a summary."""
    if training.device.type == "cpu":
        tune_allocator()
    set_sampling(training, arguments)

    if arguments.pooling:
        model = sentence_transformer(arguments.model_name_or_path, arguments.pooling, model_kwargs=FULL_PRECISION)
    else:  # the pooling of a saved model, or the mean for a bare NeoBERT
        model = SentenceTransformer(arguments.model_name_or_path, model_kwargs=FULL_PRECISION)
    model.max_seq_length = arguments.max_seq_length or min(model.max_seq_length, 512)

    sides = arguments.instruction_sides
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
    evaluators = [pairs_evaluator(read_pairs(file), Path(file).stem) for file in arguments.validation_files or ()]
    files = [*(arguments.train_files or ()), *filter(None, [arguments.instructions])]
    run = {
        "arguments": {name: value for name, value in asdict(arguments).items() if name != "validation_files"},
        "sha256": {file: file_hash(Path(file)) for file in files},
        "num_rows": {name: len(rows) for name, rows in sets.items()},
        "batch_size": training.train_batch_size * training.gradient_accumulation_steps * training.world_size,
        **{name: value for name, value in training.to_dict().items() if name in CURVE},
    }
    exactly = not training.resume_inexactly
    checkpoint = begin_or_resume(training.output_dir, run, training.resume_from_checkpoint, exactly)

    names = ("temperature", "mini_batch_size", "gather_across_devices")
    loss = contrastive_loss(model, **{name: getattr(arguments, name) for name in names})
    trainer = ContrastiveTrainer(model, training, train_dataset=sets, loss=loss, evaluator=evaluators or None)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    with saving(Path(training.output_dir), STILL_GOOD):
        trainer.save_model()
    if trainer.is_world_process_zero():
        metrics = {name: value for evaluator in evaluators for name, value in evaluator(model).items()}
        summary = {
            "steps": trainer.state.global_step,
            **{name: run[name] for name in ("batch_size", "learning_rate")},
            "num_rows": sum(run["num_rows"].values()),
            **{name: getattr(arguments, name) for name in ("temperature", "sampling_exponent")},
            "max_seq_length": model.max_seq_length,
            **metrics,
        }
        write_json(Path(training.output_dir, "training_summary.json"), summary, STILL_GOOD)
        print(json.dumps(summary))


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
