"""Fine-tune NeoBERT with LoRA to classify texts or pairs of texts: small matrices beside the frozen weights, and the head.

    python examples/finetune_lora.py --train_file train.csv --output_dir runs/lora
    python examples/finetune_lora.py --train_file train.csv --output_dir runs/lora --model_name_or_path chandar-lab/NeoBERT
    python examples/finetune_lora.py --test_file new.csv --model_name_or_path runs/lora --output_dir runs/predictions

Columns, kinds of labels and metrics are those of examples/finetune_classifier.py. The folder holds the adapter, which opens by
`neobert_hf.open_adapter(AutoModelForSequenceClassification, "runs/lora")`. With --merge, runs/lora/merged holds a whole model.
"""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, Trainer, set_seed

from neobert_hf import MINI_MODEL_PATH, lora_config, open_adapter, save_adapter, tune_allocator
from neobert_hf.files.trust import load_tokenizer
from neobert_hf.finetuning.cards import write_finetuning_card
from neobert_hf.finetuning.classification import ClassificationTask
from neobert_hf.finetuning.labelled_texts import LabelledTextArguments, read_texts
from neobert_hf.finetuning.predictions import write_predictions
from neobert_hf.runs.adapters import labels_of_adapter
from neobert_hf.runs.arguments import FineTuningArguments, default_learning_rate
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.signals import SaveOnTerminate


@dataclass
class LoraArguments(LabelledTextArguments):
    """Model and data."""

    model_name_or_path: str = field(
        default=MINI_MODEL_PATH,
        metadata={"help": "A NeoBERT: folder or id on the Hub. Without training rows, the folder of an adapter."},
    )
    lora_rank: int = field(default=16, metadata={"help": "Inner size of the matrices: more learn more."})
    lora_alpha: int = field(default=32, metadata={"help": "The product of the matrices counts alpha / rank times."})
    target_modules: list[str] = field(
        default_factory=lambda: ["qkv", "wo", "w12", "w3"], metadata={"help": "Layers that get matrices."}
    )
    merge: bool = field(
        default=False, metadata={"help": "Save the sum of model and adapter too, in OUTPUT_DIR/merged."}
    )


def train(arguments: LoraArguments, training: FineTuningArguments):
    """Train and evaluate, if there are training rows; predict the labels of the test rows, if there are any."""
    tune_allocator()
    set_seed(training.seed)
    source, folder = arguments.model_name_or_path, Path(training.output_dir)
    if arguments.has_training:
        task = ClassificationTask(read_texts(arguments, training.seed))
        base = task.load_model(source, arguments.max_seq_length)
        options = {"r": arguments.lora_rank, "lora_alpha": arguments.lora_alpha}
        model = get_peft_model(base, lora_config("SEQ_CLS", target_modules=arguments.target_modules, **options))
        model.print_trainable_parameters()
        training.choose_learning_rate(base.config, 10 * default_learning_rate(base.config))
        training.choose_metric(task.texts.data["validation"].num_rows, task.best_metric)
    else:
        task = ClassificationTask(read_texts(arguments, training.seed, *labels_of_adapter(source)))
        model = open_adapter(AutoModelForSequenceClassification, source, dtype="float32")
    tokenizer = load_tokenizer(source, model.config.vocab_size)
    rows = task.tokenize(tokenizer, arguments.max_seq_length)
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
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        task.restore_numbers(trainer.model)
        task.evaluate(trainer, rows["validation"], "validation")
        save_adapter(trainer.model, folder)
        tokenizer.save_pretrained(folder)
        print(f"open the adapter by neobert_hf.open_adapter(AutoModelForSequenceClassification, {str(folder)!r})")
    if arguments.test_file:
        logits = task.evaluate(trainer, rows["test"], "test")
        write_predictions(arguments.predictions_file, task.prediction_rows(logits, arguments.label_separator), folder)
    write_finetuning_card(arguments, training, task.texts.data)
    if arguments.has_training and arguments.merge:
        trainer.model.merge_and_unload().save_pretrained(folder / "merged")
        tokenizer.save_pretrained(folder / "merged")
        write_finetuning_card(arguments, training, task.texts.data, folder=folder / "merged")


def main():
    """Read the command line, and train."""
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # PEFT asks for it
    parser = CommandParser((LoraArguments, FineTuningArguments), description=__doc__)
    run_command(parser.prog, train, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
