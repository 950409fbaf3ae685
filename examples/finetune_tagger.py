"""Fine-tune NeoBERT, or any other encoder, to tag words, for example with the names of people and places.

    python examples/finetune_tagger.py --train_file train.conll --validation_file dev.conll --output_dir runs/tagger
    python examples/finetune_tagger.py --train_file train.jsonl --test_file test.jsonl --output_dir runs/tagger
    python examples/finetune_tagger.py --dataset_name lhoestq/conll2003 --model_name_or_path chandar-lab/NeoBERT \\
        --output_dir runs/conll
    python examples/finetune_tagger.py --model_name_or_path runs/tagger --test_file new.conll --output_dir runs/new

A CoNLL file (.conll, .txt, .iob, .bio, .tsv) has a word and its tag on each line, and an empty line after each sentence. A row of
JSON lines has two lists: {"words": ["Ada", "codes"], "tags": ["B-PERSON", "O"]}. Without training rows the last command predicts
with a saved tagger. A saved folder opens in
`pipeline("token-classification", model="runs/tagger", trust_remote_code=True, aggregation_strategy="first")`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import DataCollatorForTokenClassification, Trainer, set_seed

from neobert_hf import MINI_MODEL_PATH, tune_allocator
from neobert_hf.files.trust import load_tokenizer
from neobert_hf.finetuning.cards import write_finetuning_card
from neobert_hf.finetuning.predictions import write_predictions
from neobert_hf.finetuning.tagged_words import TaggedWordArguments, read_tagged_words
from neobert_hf.finetuning.tagging import TaggingTask, piece_loss, trained_tags
from neobert_hf.runs.arguments import FineTuningArguments
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.signals import SaveOnTerminate


@dataclass
class TaggerArguments(TaggedWordArguments):
    """Model and data."""

    model_name_or_path: str = field(default=MINI_MODEL_PATH, metadata={"help": "Folder or id on the Hub."})


def train(arguments: TaggerArguments, training: FineTuningArguments):
    """Train and evaluate, if there are training rows; predict the tags of the test rows, if there are any."""
    tune_allocator()
    set_seed(training.seed)
    tokenizer = load_tokenizer(arguments.model_name_or_path)
    tokenizer.add_prefix_space = True  # RoBERTa's class in transformers 4 demands it; the task adds the spaces
    if arguments.has_training:
        task = TaggingTask(read_tagged_words(arguments, training.seed))
        tokenizer.model_max_length = arguments.max_seq_length
    else:
        task = TaggingTask(read_tagged_words(arguments, training.seed, trained_tags(arguments.model_name_or_path)))
    max_length = min(tokenizer.model_max_length, arguments.max_seq_length)
    model = task.load_model(arguments.model_name_or_path, max_length)
    rows = task.tokenize(tokenizer, max_length)
    trainer = Trainer(
        model,
        training,
        DataCollatorForTokenClassification(tokenizer),
        train_dataset=rows.get("train"),
        eval_dataset=rows.get("validation", rows.get("test")),
        processing_class=tokenizer,
        compute_loss_func=piece_loss,
        compute_metrics=task.metrics,
        callbacks=[SaveOnTerminate()],
    )
    if arguments.has_training:
        training.choose_learning_rate(model.config)
        training.choose_metric(len(rows["validation"]))
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model()
        task.evaluate(trainer, "validation")
    if arguments.test_file:
        logits = task.evaluate(trainer, "test")
        file = arguments.predictions_file or Path(training.output_dir, "predictions.jsonl")
        if trainer.is_world_process_zero():
            write_predictions(file, task.prediction_rows(logits))
    write_finetuning_card(arguments, training, task.words.data)


def main():
    """Read the command line, and train."""
    parser = CommandParser((TaggerArguments, FineTuningArguments), description=__doc__)
    run_command(parser.prog, train, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
