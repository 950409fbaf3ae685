"""Classify texts with a few examples of each class, in seconds: contrastive training, then a logistic regression.

    python examples/finetune_few_shot.py --train_file examples.csv --output_dir runs/few
    python examples/finetune_few_shot.py --train_file train.csv --examples_per_class 16 --test_file dev.csv \\
        --output_dir runs/few --model_name_or_path chandar-lab/NeoBERT
    python examples/finetune_few_shot.py --test_file new.csv --model_name_or_path runs/few --output_dir runs/predictions

The folder is a sentence-transformers model whose vectors are the logits of the classes:
`SentenceTransformer("runs/few", trust_remote_code=True).encode(texts)`; config.json has the names of the classes.
"""

from neobert_hf.finetuning import FewShotArguments, FewShotClassifier, FewShotTrainingArguments, read_labelled_texts
from neobert_hf.hub import write_card
from neobert_hf.runs import run_script, tune_allocator


def train(arguments: FewShotArguments, training: FewShotTrainingArguments):
    """Train, if there are training rows; evaluate on validation and test rows, and predict the labels of the latter."""
    tune_allocator()
    classifier = FewShotClassifier(arguments.model_name_or_path, arguments.max_seq_length)
    rows = read_labelled_texts(arguments, training.seed, classifier)
    if arguments.train_file and not arguments.validation_file:  # every example counts
        rows.train, rows.validation = [a + b for a, b in zip(rows.train, rows.validation)], None
    if rows.train:
        options = {"classes": rows.classes, "examples_per_class": arguments.examples_per_class}
        classifier.fit(*rows.train, rows.validation, training, **options)
        classifier.save(training.output_dir, rows)
    if rows.test:
        classifier.predict_rows(rows, training, arguments.predictions_file)
    if rows.train and training.should_save:
        write_card(training.output_dir, example=rows.example)


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
