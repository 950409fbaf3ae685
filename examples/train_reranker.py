"""Train a reranker: a NeoBERT that reads a question and a document together and gives a score, by sentence-transformers.

    python examples/train_reranker.py --train_files pairs.csv --output_dir runs/reranker
    python examples/train_reranker.py --train_files pairs.jsonl --model_name_or_path chandar-lab/NeoBERT \\
        --embedding_model runs/embeddings --max_seq_length 256 --bf16 --output_dir runs/reranker

The first column has questions, the second their answers; an embedding model finds wrong answers that look right. The folder
opens in `CrossEncoder("runs/reranker")`. Rerun the command with `--resume_from_checkpoint last` to resume after an interruption.
"""

from dataclasses import asdict

from transformers import set_seed

from neobert_hf import tune_allocator
from neobert_hf.embeddings.models import open_embedding_model
from neobert_hf.embeddings.reranking import (
    RerankerArguments,
    RerankerTrainer,
    RerankerTrainingArguments,
    labelled_pairs,
    open_reranker,
    reranking_evaluator,
    reranking_loss,
)
from neobert_hf.embeddings.training import start_files, train_and_summarize
from neobert_hf.embeddings.training_sets import hold_out, read_sets_of_pairs
from neobert_hf.runs.arguments import default_learning_rate
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.folders import lock_run


def train(arguments: RerankerArguments, training: RerankerTrainingArguments):
    """Train, save, evaluate before and after, and write a summary."""
    if training.device.type == "cpu":
        tune_allocator()

    # 1. Data: pairs, and wrong answers that the embedding model ranks first
    pairs = read_sets_of_pairs(arguments.train_files)
    documents = {document for rows in pairs.values() for document in rows["positive"]}
    held_out = read_sets_of_pairs(arguments.validation_files or ())
    if not held_out:
        pairs, held_out = hold_out(pairs, arguments.held_out_share, training.seed)
    retriever = open_embedding_model(arguments.embedding_model)
    sets = labelled_pairs(pairs, retriever, arguments.num_negatives)
    for name, rows in sets.items():
        print(f"{name}: {len(pairs[name]):,} pairs, {len(rows) - sum(rows['label']):,} negatives", flush=True)
    evaluators = [
        reranking_evaluator(rows, sorted(documents), retriever, name, arguments.num_candidates)
        for name, rows in held_out.items()
    ]

    # 2. Model, whose head may be new
    set_seed(training.seed)
    model = open_reranker(arguments.model_name_or_path, arguments.max_seq_length)
    if training.learning_rate is None:
        training.learning_rate = default_learning_rate(model.config)

    # 3. Training
    loss = reranking_loss(model, sets)
    values = {name: value for name, value in asdict(arguments).items() if name != "validation_files"}
    starts = [*start_files(arguments.model_name_or_path), *start_files(arguments.embedding_model)]
    summary = train_and_summarize(
        lambda _: RerankerTrainer(model, training, train_dataset=sets, loss=loss, evaluator=evaluators or None),
        training,
        {**values, "max_seq_length": model.max_seq_length, "epochs": training.num_train_epochs},
        files=[*arguments.train_files, *starts],
        num_rows={name: sum(rows["label"]) for name, rows in sets.items()},
        evaluators=evaluators,
        shown=("num_negatives", "num_candidates", "max_seq_length", "epochs"),
    )
    for evaluator in evaluators if summary else ():
        base, found = (summary["after"][f"{evaluator.name}_{name}"] for name in ("base_ndcg@10", "ndcg@10"))
        advice = "" if found > base else "; the reranker is not better: do not use it, or train it on more pairs"
        count = f"{len(evaluator.samples):,} questions"
        print(f"{evaluator.name}: nDCG@10 {base:.4f} of the embedding model alone, on {count}{advice}")


def train_alone(arguments: RerankerArguments, training: RerankerTrainingArguments):
    """Train, and lock the folder against other processes."""
    with lock_run(training.output_dir):
        train(arguments, training)


def main():
    """Read the command line, and train."""
    parser = CommandParser((RerankerArguments, RerankerTrainingArguments), description=__doc__)
    run_command(parser.prog, train_alone, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
