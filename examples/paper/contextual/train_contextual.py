"""Train contextual document embeddings (paper, section 5.2.2 and appendix G) with sentence-transformers' trainer.

The two stages of the paper, on its public data:

    python examples/paper/contextual/train_contextual.py --stage unsupervised --bf16 \\
        --model_name_or_path chandar-lab/NeoBERT --output_dir runs/stage-1
    python examples/paper/contextual/train_contextual.py --stage supervised --bf16 \\
        --model_name_or_path runs/stage-1 --output_dir runs/stage-2

A short run on pairs of your own, with a small model as model and surrogate:

    python examples/paper/contextual/train_contextual.py --train_files pairs.jsonl --validation_files held_out_pairs.jsonl \\
        --model_name_or_path src/neobert_hf/mini --surrogate_model src/neobert_hf/mini --output_dir runs/contextual --use_cpu \\
        --context_size 32 --max_seq_length 64 --max_steps 50 --per_device_train_batch_size 64 --warmup_steps 5

The first start embeds and clusters all pairs, and keeps the clusters in the output folder. Rerun the command to
resume exactly after an interruption.
"""

from dataclasses import replace

import torch
from contextual_embeddings import EvaluatorInContext, contextual_sentence_transformer
from contextual_training import (
    ContextualArguments,
    ContextualRankingLoss,
    ContextualTrainingArguments,
    open_pairs,
    use_clusters,
)
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from transformers import set_seed

from neobert_hf.embeddings import ContrastiveTrainer, pairs_evaluators, read_sets_of_pairs, train_and_record
from neobert_hf.runs import run_script


def train(arguments: ContextualArguments, training: ContextualTrainingArguments):
    """Train, save, evaluate, and write the record of the training."""
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
    train_and_record(
        ContrastiveTrainer,
        model,
        training,
        sets,
        loss,
        [EvaluatorInContext(plain) for plain in pairs_evaluators(validation)],
        replace(arguments, context_size=loss.context_size),
    )


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
