"""Evaluate a small masked language model in one go: three tasks of GLUE, and pseudo-perplexity by length.

    python examples/paper/evaluate_model.py --model_name_or_path src/neobert_hf/mini --data_dir glue --files texts.jsonl \\
        --output_dir runs/evaluation

It fine-tunes the model on SST-2, CoLA and STS-B, with several seeds. evaluation.json has all results, evaluation.md the tables;
--card writes them into the README.md of the model. Rerun the command to resume.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from evaluation_report import evaluation_report, write_card_section
from glue_runs import GlueArguments, GlueTrainingArguments, run_suite
from pseudo_perplexity import load_masked_model
from pseudo_perplexity_runs import PseudoPerplexityArguments, evaluate_files

from neobert_hf import best_dtype, tune_allocator
from neobert_hf.embeddings import hash_of_weights
from neobert_hf.files import run_command
from neobert_hf.runs import CommandParser, environment, lock_run


@dataclass
class EvaluationArguments:
    """Model, data and results."""

    files: list[str] = field(metadata={"help": "Files of rows with the texts of the pseudo-perplexity."})
    output_dir: str = field(metadata={"help": "Folder of the results; rerun the command to resume."})
    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of a model."})
    data_dir: str = field(
        default=None, metadata={"help": "Folder with the folders SST-2, CoLA and STS-B. Default: the rows of the Hub."}
    )
    seeds: int = field(default=3, metadata={"help": "Fine-tuning runs of each task."})
    learning_rate: float = field(default=3e-4, metadata={"help": "The paper's values suit larger models."})
    max_steps: int = field(default=400, metadata={"help": "Steps of 32 rows of a fine-tuning run."})
    num_texts: int = field(default=200, metadata={"help": "Number of texts for the pseudo-perplexity."})
    positions: int = field(default=64, metadata={"help": "Number of positions per text, drawn at random."})
    max_seq_length: int = field(default=512, metadata={"help": "Length in tokens at which these texts are truncated."})
    card: str = field(
        default=None, metadata={"help": "README.md of the model, whose section Evaluation gets the tables."}
    )


def evaluate(arguments: EvaluationArguments):
    """Evaluate, and write results, tables and card."""
    tune_allocator()
    model, folder = arguments.model_name_or_path, Path(arguments.output_dir)

    # 1. Arguments of the two parts.
    options = dict(
        num_texts=arguments.num_texts, max_seq_length=arguments.max_seq_length, positions=arguments.positions
    )
    texts = PseudoPerplexityArguments(arguments.files, str(folder / "texts"), model, **options)
    options = dict(data_dir=arguments.data_dir, preset="none", seeds=arguments.seeds, max_seq_length=128)
    glue = GlueArguments(model, ["sst2", "cola", "stsb"], transfer=False, **options)
    training = GlueTrainingArguments(
        output_dir=str(folder / "glue"),
        learning_rate=arguments.learning_rate,
        max_steps=arguments.max_steps,
        eval_steps=min(200, arguments.max_steps),
    )

    # 2. Pseudo-perplexity by length, and fine-tuning.
    with lock_run(folder):
        perplexity, tasks = evaluate_files(texts), run_suite(glue, training)["tasks"]

    # 3. Results without the folders of this machine.
    result = {
        "model": Path(model).name,
        "weights": hash_of_weights(load_masked_model(model)),
        "pseudo_perplexity": {**perplexity, "model": Path(model).name, "max_seq_length": arguments.max_seq_length},
        "glue": [{name: value for name, value in task.items() if name not in ("model", "start")} for task in tasks],
        "learning_rate": arguments.learning_rate,
        "max_steps": arguments.max_steps,
        "dtype": str(best_dtype("cuda" if torch.cuda.is_available() else "cpu")).removeprefix("torch."),
        **environment(),
    }
    (folder / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    report = evaluation_report(result)
    (folder / "evaluation.md").write_text(report + "\n", "utf-8")
    print(report)
    if arguments.card:
        write_card_section(arguments.card, evaluation_report(result, for_card=True))


def main():
    """Read the command line, and evaluate."""
    parser = CommandParser(EvaluationArguments, description=__doc__)
    run_command(parser.prog, evaluate, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
