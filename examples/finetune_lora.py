"""Fine-tune NeoBERT with LoRA to classify texts or pairs of texts: small matrices beside the frozen weights, and the head.

    python -m neobert_hf.examples.finetune_lora --train_file train.csv --output_dir runs/lora
    python -m neobert_hf.examples.finetune_lora --train_file train.csv --output_dir runs/lora \\
        --model_name_or_path chandar-lab/NeoBERT
    python -m neobert_hf.examples.finetune_lora --test_file new.csv --model_name_or_path runs/lora --output_dir runs/predictions

Columns, kinds of labels and metrics are those of `neobert finetune-classifier`. The folder holds the adapter, which opens by
`neobert_hf.open_adapter(AutoModelForSequenceClassification, "runs/lora")`. With --merge, runs/lora/merged holds a whole model.
"""

import warnings
from dataclasses import dataclass

from neobert_cli.parser import option
from neobert_hf import MINI_MODEL_PATH
from neobert_hf.checkpoints import lora_config, write_card
from neobert_hf.finetuning import Classifier, LabelledTextArguments, read_labelled_texts, say_saved
from neobert_hf.runs import FineTuningArguments, run_script, tune_allocator


@dataclass
class LoraArguments(LabelledTextArguments):
    """Model and data."""

    model_name_or_path: str = option(
        "A NeoBERT: folder or id on the Hub. Without training rows, the folder of an adapter.", MINI_MODEL_PATH
    )
    lora_rank: int = option("Inner size of the matrices: more learn more.", 16)
    lora_alpha: int = option("The product of the matrices counts alpha / rank times.", 32)
    target_modules: list[str] = option("Layers that get matrices.", ["qkv", "wo", "w12", "w3"])
    merge: bool = option("Save the sum of model and adapter too, in OUTPUT_DIR/merged.", False)


def train(arguments: LoraArguments, training: FineTuningArguments):
    """Train and evaluate, if there are training rows; predict the labels of the test rows, if there are any."""
    tune_allocator()
    folder, matrices = training.output_dir, {"r": arguments.lora_rank, "lora_alpha": arguments.lora_alpha}
    adapter = lora_config("SEQ_CLS", target_modules=arguments.target_modules, **matrices)
    length, options = arguments.max_seq_length, {"adapter": adapter, "truncation": arguments.truncation}
    classifier = Classifier(arguments.model_name_or_path, length, **options)
    rows = read_labelled_texts(arguments, training.seed, classifier)
    if rows.train:
        labels = {"classes": rows.classes, "problem_type": rows.problem_type}
        classifier.fit(*rows.train, rows.validation, training, **labels)
        classifier.save(folder, rows)
    if rows.test:
        options = {"separator": arguments.label_separator}
        classifier.predict_rows(rows, training, arguments.predictions_file, arguments.overwrite, **options)
    if rows.train and training.should_save:
        write_card(folder, example=rows.example)
        print(f"open the adapter by neobert_hf.open_adapter(AutoModelForSequenceClassification, {str(folder)!r})")
        say_saved(folder, "--text_columns", *arguments.text_columns, test_file="NEW.csv")
    if rows.train and arguments.merge:
        classifier.merge()
        classifier.save(f"{folder}/merged", rows, overwrite=True)  # of an earlier attempt
        if training.should_save:
            write_card(f"{folder}/merged", example=rows.example)
            say_saved(f"{folder}/merged", "--text_columns", *arguments.text_columns, test_file="NEW.csv")


def main():
    """Read the command line, and train."""
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # PEFT asks for it
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
