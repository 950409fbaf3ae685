"""Fine-tune NeoBERT, or any other encoder, to classify texts or pairs of texts.

    python examples/finetune_classifier.py --train_file train.csv --validation_file dev.csv --text_columns review \\
        --label_column stars --output_dir runs/classifier
    python examples/finetune_classifier.py --dataset_name nyu-mll/glue --dataset_config rte \\
        --text_columns sentence1 sentence2 --model_name_or_path chandar-lab/NeoBERT --output_dir runs/rte

The folder opens in `pipeline("text-classification", model="runs/classifier", trust_remote_code=True)`.
"""

from dataclasses import dataclass, field

import torch
from sklearn.metrics import accuracy_score, f1_score
from transformers import AutoModelForSequenceClassification, Trainer, set_seed

from neobert_hf import MINI_MODEL_PATH, tune_allocator
from neobert_hf.data.labelled_texts import LabelledTextArguments, read_texts
from neobert_hf.data.origins import load_tokenizer
from neobert_hf.data.texts import check_max_length
from neobert_hf.runs.arguments import FineTuningArguments
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.signals import SaveOnTerminate


@dataclass
class ClassifierArguments(LabelledTextArguments):
    """Model and data."""

    model_name_or_path: str = field(default=MINI_MODEL_PATH, metadata={"help": "Folder or id on the Hub."})


def metrics(predictions) -> dict[str, float]:
    """Return accuracy, and the mean over the classes of F1."""
    labels, predicted = predictions.label_ids, predictions.predictions.argmax(-1)
    return {"accuracy": accuracy_score(labels, predicted), "f1": f1_score(labels, predicted, average="macro")}


def train(arguments: ClassifierArguments, training: FineTuningArguments):
    """Train, evaluate after each epoch, and save the best model."""
    tune_allocator()
    set_seed(training.seed)
    data = read_texts(arguments, training.seed).data
    names = dict(enumerate(data["train"].features["label"].names))
    tokenizer = load_tokenizer(arguments.model_name_or_path)

    def tokenize(rows):
        texts = [rows[column] for column in arguments.text_columns]
        return tokenizer(*texts, truncation=True, max_length=arguments.max_seq_length)

    data = data.map(tokenize, batched=True, remove_columns=arguments.text_columns)
    options = {"id2label": names, "label2id": {name: i for i, name in names.items()}, "dtype": torch.float32}
    # also for a start that was fine-tuned for other labels
    options |= {"problem_type": "single_label_classification", "ignore_mismatched_sizes": True}
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model_name_or_path, **options)
    check_max_length(model, arguments.max_seq_length)
    training.choose_learning_rate(model.config)
    rows = {"train_dataset": data["train"], "eval_dataset": data["validation"]}
    options = {"processing_class": tokenizer, "compute_metrics": metrics, "callbacks": [SaveOnTerminate()]}
    trainer = Trainer(model, training, **rows, **options)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())


def main():
    """Read the command line, and train."""
    parser = CommandParser((ClassifierArguments, FineTuningArguments), description=__doc__)
    run_command(parser.prog, train, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
