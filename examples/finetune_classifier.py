"""Fine-tune NeoBERT, or any other encoder, to classify texts or pairs of texts, or to predict numbers.

    python examples/finetune_classifier.py --train_file tickets.csv --output_dir runs/tickets
    python examples/finetune_classifier.py --train_file train.csv --test_file test.csv --text_columns review \\
        --label_column stars --output_dir runs/stars
    python examples/finetune_classifier.py --dataset_name nyu-mll/glue --dataset_config rte \\
        --text_columns sentence1 sentence2 --model_name_or_path chandar-lab/NeoBERT --output_dir runs/rte
    python examples/finetune_classifier.py --model_name_or_path runs/tickets --test_file new.csv --output_dir runs/new

A label is a class, a list of classes (or --label_separator, --label_columns), or a number with a fraction. Without training
rows the last command predicts with a saved model. A saved folder opens in
`pipeline("text-classification", model="runs/tickets", trust_remote_code=True)`.
"""

from dataclasses import dataclass, field
from typing import Literal

from transformers import Trainer, set_seed

from neobert_hf import MINI_MODEL_PATH, tune_allocator
from neobert_hf.files.trust import load_tokenizer
from neobert_hf.finetuning.cards import write_finetuning_card
from neobert_hf.finetuning.classification import ClassificationTask, trained_labels
from neobert_hf.finetuning.labelled_texts import LabelledTextArguments, read_texts
from neobert_hf.finetuning.predictions import write_predictions
from neobert_hf.runs.arguments import FineTuningArguments
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.signals import SaveOnTerminate


@dataclass
class ClassifierArguments(LabelledTextArguments):
    """Model and data."""

    model_name_or_path: str = field(default=MINI_MODEL_PATH, metadata={"help": "Folder or id on the Hub."})
    classifier_pooling: Literal["cls", "mean"] = field(
        default=None,
        metadata={"help": "The classifier reads the first token or the mean of all. Default: the config's."},
    )


def train(arguments: ClassifierArguments, training: FineTuningArguments):
    """Train and evaluate, if there are training rows; predict the labels of the test rows, if there are any."""
    tune_allocator()
    set_seed(training.seed)
    tokenizer = load_tokenizer(arguments.model_name_or_path)
    if arguments.has_training:
        task = ClassificationTask(read_texts(arguments, training.seed))
        training.choose_metric(task.texts.data["validation"].num_rows, task.best_metric)
    else:
        task = ClassificationTask(read_texts(arguments, training.seed, *trained_labels(arguments.model_name_or_path)))
    rows = task.tokenize(tokenizer, arguments.max_seq_length)
    model = task.load_model(arguments.model_name_or_path, tokenizer.model_max_length, arguments.classifier_pooling)
    trainer = Trainer(
        model,
        training,
        train_dataset=rows.get("train"),
        eval_dataset=rows.get("validation", rows.get("test")),
        processing_class=tokenizer,
        compute_metrics=task.metrics,
        callbacks=[SaveOnTerminate()],
    )
    if arguments.has_training:
        training.choose_learning_rate(model.config)
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        task.restore_numbers(trainer.model)
        task.evaluate(trainer, rows["validation"], "validation")  # refuses a model that has diverged
        trainer.save_model()
    if arguments.test_file:
        logits = task.evaluate(trainer, rows["test"], "test")
        if trainer.is_world_process_zero():
            found = task.prediction_rows(logits, arguments.label_separator)
            write_predictions(arguments.predictions_file, found, training.output_dir)
    write_finetuning_card(arguments, training, task.texts.data)


def main():
    """Read the command line, and train."""
    parser = CommandParser((ClassifierArguments, FineTuningArguments), description=__doc__)
    run_command(parser.prog, train, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
