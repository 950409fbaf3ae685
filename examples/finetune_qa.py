"""Fine-tune NeoBERT, or any other encoder, to answer a question by a part of a text, or to say that it has no answer.

    neobert finetune-qa --train_file train-v2.0.json --validation_file dev-v2.0.json --output_dir runs/qa
    neobert finetune-qa --dataset_name rajpurkar/squad_v2 --model_name_or_path chandar-lab/NeoBERT \\
        --output_dir runs/squad
    neobert finetune-qa --model_name_or_path runs/qa --test_file questions.jsonl --output_dir runs/answers

Files are SQuAD's own JSON, or rows with question, context and answers. `QuestionAnswerer("runs/qa").predict(questions, texts)`
asks the saved model.
"""

from dataclasses import dataclass

from neobert_cli.parser import option
from neobert_hf import MINI_MODEL_PATH
from neobert_hf.checkpoints import write_card
from neobert_hf.finetuning import LabelledDataArguments, QuestionAnswerer, read_questions, say_saved
from neobert_hf.runs import FineTuningArguments, run_script, tune_allocator


@dataclass
class QuestionArguments(LabelledDataArguments):
    """Model and data."""

    model_name_or_path: str = option("Folder or id on the Hub.", MINI_MODEL_PATH)
    stride: int = option("Tokens that two windows share. Default: a quarter of one.")
    max_answer_tokens: int = option("Length of the longest answer.", 64)


def train(arguments: QuestionArguments, training: FineTuningArguments):
    """Train, evaluate after each epoch, keep the best model, and answer the test questions."""
    tune_allocator()
    options = {"stride": arguments.stride, "max_answer_tokens": arguments.max_answer_tokens}
    answerer = QuestionAnswerer(arguments.model_name_or_path, arguments.max_seq_length, **options)
    rows = read_questions(arguments, training.seed)
    if rows.train:
        answerer.fit(*rows.train, rows.validation, training)
        answerer.save(training.output_dir, rows)
    if rows.test:
        file = arguments.predictions_file or f"{training.output_dir}/predictions.jsonl"
        answerer.predict_rows(rows, training, file, arguments.overwrite)
    if rows.train and training.should_save:
        write_card(training.output_dir, example=rows.example)
        say_saved(training.output_dir, test_file="NEW.jsonl")


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
