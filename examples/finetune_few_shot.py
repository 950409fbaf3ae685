"""Classify texts with a few examples of each class, in seconds: contrastive training, then a logistic regression.

    python examples/finetune_few_shot.py --train_file examples.csv --output_dir runs/few
    python examples/finetune_few_shot.py --train_file train.csv --examples_per_class 16 --test_file dev.csv \\
        --output_dir runs/few --model_name_or_path chandar-lab/NeoBERT
    python examples/finetune_few_shot.py --test_file new.csv --model_name_or_path runs/few --output_dir runs/predictions

The folder is a sentence-transformers model whose vectors are the logits of the classes:
`SentenceTransformer("runs/few", trust_remote_code=True).encode(texts)`; config.json has the names of the classes.
"""

import torch
from datasets import concatenate_datasets
from transformers import set_seed

from neobert_hf import tune_allocator
from neobert_hf.embeddings.models import open_embedding_model
from neobert_hf.finetuning.cards import write_finetuning_card
from neobert_hf.finetuning.classification import ClassificationTask
from neobert_hf.finetuning.few_examples import (
    FewExamplesArguments,
    FewExamplesTrainingArguments,
    add_head,
    classes_of,
    draw_examples,
    train_on_triplets,
)
from neobert_hf.finetuning.labelled_texts import read_texts
from neobert_hf.finetuning.predictions import write_predictions
from neobert_hf.runs.commands import CommandParser, run_command


def train(arguments: FewExamplesArguments, training: FewExamplesTrainingArguments):
    """Train, if there are training rows; evaluate on validation and test rows, and predict the labels of the latter."""
    tune_allocator()
    set_seed(training.seed)
    (column,) = arguments.text_columns
    model = open_embedding_model(arguments.model_name_or_path, model_kwargs={"dtype": torch.float32})
    if arguments.has_training:
        texts = read_texts(arguments, training.seed)
        data = texts.data
        if arguments.train_file and not arguments.validation_file:  # every example counts
            data["train"] = concatenate_datasets([data["train"], data.pop("validation")])
        examples = data["train"] = draw_examples(data["train"], arguments.examples_per_class, training.seed)
        print(f"{len(examples)} examples of {len(texts.names)} classes: {', '.join(texts.names)}", flush=True)
        model.max_seq_length = arguments.max_seq_length
        train_on_triplets(model, examples, column, training)
        add_head(model, examples[column], examples["label"], texts.names)
        model.save_pretrained(training.output_dir, create_model_card=False)  # which would be of an embedding model
    else:
        names = classes_of(model, arguments.model_name_or_path)
        texts = read_texts(arguments, training.seed, arguments.problem_type, names)
    task = ClassificationTask(texts)
    for split in ("validation", "test"):
        if split in texts.data:
            logits = model.encode(texts.data[split][column], batch_size=training.per_device_eval_batch_size)
            task.report(logits, split, training.output_dir)
    if arguments.test_file:
        write_predictions(arguments.predictions_file, task.prediction_rows(logits), training.output_dir)
    write_finetuning_card(arguments, training, texts.data, model)


def main():
    """Read the command line, and train."""
    parser = CommandParser((FewExamplesArguments, FewExamplesTrainingArguments), description=__doc__)
    run_command(parser.prog, train, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
