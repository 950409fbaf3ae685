"""Fine-tune NeoBERT, or any other encoder, to answer a question by a part of a text, or to say that it has no answer.

    python examples/finetune_qa.py --train_file train-v2.0.json --validation_file dev-v2.0.json --output_dir runs/qa
    python examples/finetune_qa.py --dataset_name rajpurkar/squad_v2 --model_name_or_path chandar-lab/NeoBERT \\
        --output_dir runs/squad --bf16
    python examples/finetune_qa.py --model_name_or_path runs/qa --test_file questions.jsonl --output_dir runs/answers

Files are SQuAD's own JSON, or rows with question, context and answers. `answer_questions` asks the saved model.
"""

from dataclasses import dataclass, field

from transformers import AutoModelForQuestionAnswering, Trainer, set_seed

from neobert_hf import MINI_MODEL_PATH, tune_allocator
from neobert_hf.files.texts import check_max_length
from neobert_hf.files.trust import load_tokenizer
from neobert_hf.finetuning.cards import write_finetuning_card
from neobert_hf.finetuning.labelled import LabelledDataArguments
from neobert_hf.finetuning.predictions import write_predictions
from neobert_hf.finetuning.question_answering import answer_metrics, best_answers, cut_windows, describe_windows
from neobert_hf.finetuning.questions import read_questions
from neobert_hf.runs.arguments import FineTuningArguments
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.signals import SaveOnTerminate


@dataclass
class QuestionArguments(LabelledDataArguments):
    """Model and data."""

    model_name_or_path: str = field(default=MINI_MODEL_PATH, metadata={"help": "Folder or id on the Hub."})
    stride: int = field(default=None, metadata={"help": "Tokens that two windows share. Default: a quarter of one."})
    max_answer_tokens: int = field(default=64, metadata={"help": "Length of the longest answer."})


def train(arguments: QuestionArguments, training: FineTuningArguments):
    """Train, evaluate after each epoch, save the best model, and answer the test questions."""
    tune_allocator()
    set_seed(training.seed)
    name = arguments.model_name_or_path

    # 1. Data: questions, and windows of their texts
    rows = read_questions(arguments, training.seed)
    tokenizer = load_tokenizer(name)
    if arguments.has_training or arguments.max_seq_length < tokenizer.model_max_length:
        tokenizer.model_max_length = arguments.max_seq_length  # it is saved with the model
    options = {"tokenizer": tokenizer, "max_seq_length": tokenizer.model_max_length, "stride": arguments.stride}
    options = {"fn_kwargs": options, "batched": True, "with_indices": True}
    windows = {
        split: part.map(cut_windows, remove_columns=part.column_names, **options) for split, part in rows.items()
    }
    print(*(describe_windows(split, rows[split], windows[split]) for split in rows), sep="\n", flush=True)

    def answer(split, logits):
        return best_answers(*logits, windows[split], rows[split]["context"], arguments.max_answer_tokens)

    def metrics(split, logits):
        return answer_metrics([row["answer"] for row in answer(split, logits)], rows[split]["answers"])

    # 2. Model
    model, loading = AutoModelForQuestionAnswering.from_pretrained(name, dtype="float32", output_loading_info=True)
    if not arguments.has_training and loading["missing_keys"]:
        raise ValueError(
            f"{name} was not trained to answer questions; give --train_file, or another --model_name_or_path"
        )
    check_max_length(model, tokenizer.model_max_length)

    # 3. Training
    data = {"train_dataset": windows.get("train"), "eval_dataset": windows.get("validation", windows.get("test"))}
    options = {"processing_class": tokenizer, "compute_metrics": lambda found: metrics("validation", found.predictions)}
    trainer = Trainer(model, training, **data, **options, callbacks=[SaveOnTerminate()])
    if arguments.has_training:
        training.choose_learning_rate(model.config)
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("eval", trainer.evaluate(), combined=False)

    # 4. Answers to the test questions
    if "test" in rows:
        trainer.compute_metrics = None
        logits = trainer.predict(windows["test"]).predictions
        if "answers" in rows["test"].column_names:
            trainer.log_metrics("test", found := {f"test_{key}": n for key, n in metrics("test", logits).items()})
            trainer.save_metrics("test", found, combined=False)
        questions = rows["test"].select_columns(["id", "question"])
        if trainer.is_world_process_zero():
            file = arguments.predictions_file or f"{training.output_dir}/predictions.jsonl"
            write_predictions(file, [row | found for row, found in zip(questions, answer("test", logits))])
    write_finetuning_card(arguments, training, rows)


def main():
    """Read the command line, and train."""
    parser = CommandParser((QuestionArguments, FineTuningArguments), description=__doc__)
    run_command(parser.prog, train, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
