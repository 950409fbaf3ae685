"""Fine-tune NeoBERT, or any other encoder, to tag words, for example with the names of people and places.

    neobert finetune-tagger --train_file train.conll --validation_file dev.conll --output_dir runs/tagger
    neobert finetune-tagger --train_file train.jsonl --test_file test.jsonl --output_dir runs/tagger
    neobert finetune-tagger --dataset_name lhoestq/conll2003 --model_name_or_path chandar-lab/NeoBERT \\
        --output_dir runs/conll
    neobert finetune-tagger --model_name_or_path runs/tagger --test_file new.conll --output_dir runs/new

A CoNLL file (.conll, .txt, .iob, .bio, .tsv) has a word and its tag on each line, and an empty line after each sentence. A row of
JSON lines has two lists: {"words": ["Ada", "codes"], "tags": ["B-PERSON", "O"]}. Without training rows the last command predicts
with a saved tagger. A saved folder opens in
`pipeline("token-classification", model="runs/tagger", trust_remote_code=True, aggregation_strategy="first")`.
"""

from dataclasses import dataclass

from neobert_cli.parser import option
from neobert_hf import MINI_MODEL_PATH
from neobert_hf.checkpoints import write_card
from neobert_hf.finetuning import TaggedWordArguments, Tagger, read_tagged_words, say_saved
from neobert_hf.runs import FineTuningArguments, run_script, tune_allocator


@dataclass
class TaggerArguments(TaggedWordArguments):
    """Model and data."""

    model_name_or_path: str = option("Folder or id on the Hub.", MINI_MODEL_PATH)


def train(arguments: TaggerArguments, training: FineTuningArguments):
    """Train and evaluate, if there are training rows; predict the tags of the test rows, if there are any."""
    tune_allocator()
    tagger = Tagger(arguments.model_name_or_path, arguments.max_seq_length)
    rows = read_tagged_words(arguments, training.seed, tagger)
    if rows.train:
        tagger.fit(*rows.train, rows.validation, training, classes=rows.classes)
        tagger.save(training.output_dir, rows)
    if rows.test:
        tagger.predict_rows(rows, training, arguments.predictions_file, arguments.overwrite)
    if rows.train and training.should_save:
        write_card(training.output_dir, example=rows.example)
        say_saved(training.output_dir, test_file="NEW.conll")


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
