"""Train a reranker: a NeoBERT that reads a question and a document together and gives a score, by sentence-transformers.

    neobert train-reranker --train_files pairs.csv --output_dir runs/reranker
    neobert train-reranker --train_files pairs.jsonl --model_name_or_path chandar-lab/NeoBERT \\
        --embedding_model runs/embeddings --max_seq_length 256 --output_dir runs/reranker

The first column has questions, the second their answers; an embedding model finds wrong answers that look right. The folder
opens in `CrossEncoder("runs/reranker")`. Rerun the command to resume after an interruption.
"""

from transformers import set_seed

from neobert_hf.checkpoints import write_card
from neobert_hf.embeddings import (
    RerankerArguments,
    RerankerTrainingArguments,
    open_embedding_model,
    open_reranker,
    open_sets,
    train_reranker,
)
from neobert_hf.finetuning import say_saved
from neobert_hf.runs import run_script


def train(arguments: RerankerArguments, training: RerankerTrainingArguments):
    """Train, save, evaluate before and after, and write the card."""
    # 1. Data: pairs, and the embedding model that finds wrong answers
    pairs, held_out = open_sets(arguments, training.seed)
    retriever = open_embedding_model(arguments.embedding_model)

    # 2. Model, whose head may be new
    set_seed(training.seed)
    model = open_reranker(arguments.model_name_or_path, arguments.max_seq_length)

    # 3. Training
    train_reranker(model, pairs, retriever, training, arguments, held_out)
    if training.should_save:
        write_card(training.output_dir)
        say_saved(training.output_dir, "--text_columns", "QUESTION", "TEXT", test_file="PAIRS.csv")


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
