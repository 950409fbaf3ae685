"""Fine-tune NeoBERT, or any other encoder, to classify texts or pairs of texts, or to predict numbers.

    neobert finetune-classifier --train_file tickets.csv --text_columns ticket --label_column team --output_dir runs/tickets
    neobert finetune-classifier --train_file train.csv --test_file test.csv --text_columns review \\
        --label_column stars --output_dir runs/stars
    neobert finetune-classifier --dataset_name nyu-mll/glue --dataset_config rte \\
        --text_columns sentence1 sentence2 --model_name_or_path chandar-lab/NeoBERT --output_dir runs/rte
    neobert finetune-classifier --model_name_or_path runs/tickets --test_file new.csv --text_columns ticket --output_dir runs/new

A label is a class, a list of classes (or --label_separator, --label_columns), or a number with a fraction. Without training
rows the last command predicts with a saved model. A saved folder opens in
`pipeline("text-classification", model="runs/tickets", trust_remote_code=True)`.
"""

from dataclasses import dataclass
from typing import Literal

from neobert_cli.parser import option
from neobert_hf import MINI_MODEL_PATH
from neobert_hf.checkpoints import write_card
from neobert_hf.finetuning import Classifier, LabelledTextArguments, read_labelled_texts, say_saved
from neobert_hf.runs import FineTuningArguments, run_script, tune_allocator


@dataclass
class ClassifierArguments(LabelledTextArguments):
    """Model and data."""

    model_name_or_path: str = option("Folder or id on the Hub.", MINI_MODEL_PATH)
    classifier_pooling: Literal["cls", "mean"] = option(
        "The classifier reads the first token or the mean of all. Default: the config's, or the mean."
    )
    head_first: bool = option("Fit the last layer on frozen vectors first. Default: if a class has few rows.")


def train(arguments: ClassifierArguments, training: FineTuningArguments):
    """Train and evaluate, if there are training rows; predict the labels of the test rows, if there are any."""
    tune_allocator()
    model, length = arguments.model_name_or_path, arguments.max_seq_length
    options = {"head_first": arguments.head_first, "truncation": arguments.truncation}
    classifier = Classifier(model, length, arguments.classifier_pooling, **options)
    rows = read_labelled_texts(arguments, training.seed, classifier)
    if rows.train:
        options = {"classes": rows.classes, "problem_type": rows.problem_type, "is_held_out": rows.is_held_out}
        classifier.fit(*rows.train, rows.validation, training, **options)
        classifier.save(training.output_dir, rows)
    if rows.test:
        options = {"separator": arguments.label_separator}
        classifier.predict_rows(rows, training, arguments.predictions_file, arguments.overwrite, **options)
    if rows.train and training.should_save:
        write_card(training.output_dir, example=rows.example)
        words = ["--label_separator", arguments.label_separator] if arguments.label_separator else []
        say_saved(training.output_dir, *words, "--text_columns", *arguments.text_columns, test_file="NEW.csv")


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
