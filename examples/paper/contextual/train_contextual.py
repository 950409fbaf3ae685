"""Train contextual document embeddings (paper, section 5.2.2 and appendix G) with sentence-transformers' trainer.

The two stages of the paper, on its public data:

    python examples/train_contextual.py --model_name_or_path chandar-lab/NeoBERT --stage unsupervised --bf16 \\
        --output_dir runs/stage-1
    python examples/train_contextual.py --model_name_or_path runs/stage-1 --stage supervised --bf16 --output_dir runs/stage-2

A short run on pairs of your own, with a small model as model and surrogate:

    python examples/train_contextual.py --model_name_or_path src/neobert_hf/mini --surrogate_model src/neobert_hf/mini \\
        --train_files pairs.jsonl --validation_files held_out_pairs.jsonl --output_dir runs/contextual --use_cpu \\
        --context_size 32 --max_seq_length 64 --max_steps 50 --per_device_train_batch_size 64 --warmup_steps 5

The first start embeds and clusters all pairs, and keeps the clusters in the output folder. Rerun the command with
`--resume_from_checkpoint last` to resume exactly after an interruption.
"""

from dataclasses import asdict

import torch
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from transformers import set_seed

from neobert_hf import contextual_sentence_transformer, tune_allocator
from neobert_hf.embeddings.contextual_training import (
    ContextualArguments,
    ContextualRankingLoss,
    ContextualTrainingArguments,
    open_pairs,
    use_clusters,
)
from neobert_hf.embeddings.contrastive import ContrastiveTrainer
from neobert_hf.embeddings.retrieval import EvaluatorInContext, pairs_evaluators
from neobert_hf.embeddings.training import start_files, train_and_summarize
from neobert_hf.embeddings.training_sets import read_sets_of_pairs
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.folders import lock_run


def train(arguments: ContextualArguments, training: ContextualTrainingArguments):
    """Train, save, evaluate, and write a summary."""
    if training.device.type == "cpu":
        tune_allocator()

    # 1. The model: both stages start from a NeoBERT, or from the earlier stage of training. Other weights are random.
    set_seed(training.seed)
    prompts = {"query": arguments.query_prompt, "document": arguments.document_prompt}
    model = contextual_sentence_transformer(
        arguments.model_name_or_path,
        prompts=prompts,
        max_seq_length=arguments.max_seq_length,
        context_size=arguments.context_size,
        context_dropout=arguments.context_dropout,
        model_kwargs={"dtype": torch.float32},  # of the weights; --bf16 sets the dtype of the computation
    )

    # 2. The data: pairs by dataset, in batches of one topic.
    sets = open_pairs(arguments, training.per_device_train_batch_size)
    query, document = next(iter(sets.values())).column_names[:2]
    training.prompts = {query: prompts["query"], document: prompts["document"]}
    training.batch_sampler = BatchSamplers.BATCH_SAMPLER
    clusters = use_clusters(sets, arguments, training) if arguments.batches == "clusters" else None
    for name, rows in sets.items():
        print(f"{name}: {len(rows):,} pairs", flush=True)

    # 3. Loss, evaluation, training.
    masked = None if arguments.keep_false_negatives else clusters
    loss = ContextualRankingLoss(model, arguments.temperature, arguments.mini_batch_size, masked)
    validation = read_sets_of_pairs(arguments.validation_files or ())
    evaluators = [EvaluatorInContext(plain) for plain in pairs_evaluators(validation)]
    values = asdict(arguments) | {"context_size": loss.context_size, "max_seq_length": model.max_seq_length}
    values = {name: value for name, value in values.items() if name not in ("validation_files", "clusters_dir")}
    train_and_summarize(
        lambda _: ContrastiveTrainer(model, training, train_dataset=sets, loss=loss, evaluator=evaluators or None),
        training,
        values | {"epochs": training.num_train_epochs},
        files=[*(arguments.train_files or ()), *start_files(arguments.model_name_or_path)],
        num_rows={name: len(rows) for name, rows in sets.items()},
        evaluators=evaluators,
        shown=("temperature", "context_size", "max_seq_length", "batches"),
    )


def train_alone(arguments: ContextualArguments, training: ContextualTrainingArguments):
    """Train, and lock the folder against other processes."""
    with lock_run(training.output_dir):
        train(arguments, training)


def main():
    """Read the command line, and train."""
    parser = CommandParser((ContextualArguments, ContextualTrainingArguments), description=__doc__)
    run_command(parser.prog, train_alone, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
