"""Evaluate a small masked language model in one go: three tasks of GLUE, and pseudo-perplexity by length.

    python examples/evaluate_model.py --data_dir glue --files texts.jsonl --output_dir runs/evaluation --report runs/report

It fine-tunes the model on SST-2, CoLA and STS-B, with several seeds. evaluation.json has all results. --report writes them as one
HTML page without other files, and --card into the README.md of the model. After an interruption, the same command goes on.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from tabulate import tabulate
from transformers.utils import logging

from neobert_hf import MINI_MODEL_PATH, best_dtype, tune_allocator
from neobert_hf.data.files import write_json
from neobert_hf.embeddings.models import hash_of_weights
from neobert_hf.evaluation.environment import environment
from neobert_hf.evaluation.glue_report import plot
from neobert_hf.evaluation.glue_runs import SHORT_RUN, SHORT_TASKS, GlueArguments, GlueTrainingArguments, run_suite
from neobert_hf.evaluation.pseudo_perplexity import load_masked_model
from neobert_hf.evaluation.pseudo_perplexity_runs import PseudoPerplexityArguments, evaluate_alone
from neobert_hf.evaluation.report import Section, evaluation_sections, read_card, write_card_section, write_page
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.folders import lock_run


@dataclass
class EvaluationArguments:
    """Model, data and results."""

    files: list[str] = field(
        metadata={"help": ".jsonl, .csv, .tsv or .parquet files with the texts of the pseudo-perplexity."}
    )
    output_dir: str = field(metadata={"help": "Folder of the results; the same command again goes on."})
    model_name_or_path: str = field(
        default=str(MINI_MODEL_PATH),
        metadata={"help": "Folder or Hub id of a model. Default: the mini model in this package."},
    )
    data_dir: str = field(
        default=None, metadata={"help": "Folder with SST-2, CoLA and STS-B in their original files. Default: the Hub."}
    )
    seeds: int = field(default=3, metadata={"help": "Fine-tuning runs of each task."})
    learning_rate: float = field(
        default=3e-4, metadata={"help": "Of the fine-tuning; the paper's values suit larger models."}
    )
    max_steps: int = field(default=SHORT_RUN["max_steps"], metadata={"help": "Steps of 32 rows of a fine-tuning run."})
    num_texts: int = field(default=200, metadata={"help": "Number of texts for the pseudo-perplexity."})
    positions: int = field(default=64, metadata={"help": "Number of positions per text, drawn at random."})
    max_seq_length: int = field(
        default=512, metadata={"help": "Length in tokens at which the texts of the pseudo-perplexity are truncated."}
    )
    report: str = field(default=None, metadata={"help": "Folder in which to write the report, index.html."})
    card: str = field(
        default=None, metadata={"help": "README.md of the model; the tables are written into its section Evaluation."}
    )


def fine_tune(arguments: EvaluationArguments) -> list[dict]:
    """Return the results of each task, as in glue.json."""
    glue = GlueArguments(
        arguments.model_name_or_path,
        list(SHORT_TASKS),
        data_dir=arguments.data_dir,
        preset="none",
        seeds=arguments.seeds,
        transfer=False,
        max_seq_length=128,
    )
    training = GlueTrainingArguments(
        output_dir=str(Path(arguments.output_dir, "glue")),
        learning_rate=arguments.learning_rate,
        max_steps=arguments.max_steps,
        eval_steps=min(SHORT_RUN["eval_steps"], arguments.max_steps),
        auto_precision=True,
        disable_tqdm=True,
    )
    return run_suite(glue, training)["tasks"]


def evaluate(arguments: EvaluationArguments) -> list[Section]:
    """Evaluate, write the results, and return the sections of the report."""
    tune_allocator()
    logging.disable_progress_bar()
    if arguments.card:
        read_card(arguments.card)  # an error in the card is found before the work
    out = Path(arguments.output_dir)
    texts = PseudoPerplexityArguments(
        **{name: getattr(arguments, name) for name in ("files", "model_name_or_path", "num_texts", "positions")},
        output_dir=str(out / "pseudo-perplexity"),
        max_seq_length=arguments.max_seq_length,
    )
    perplexity = {**evaluate_alone(texts), "max_seq_length": arguments.max_seq_length}
    here = ("model", "start")  # folders of this machine
    result = {
        "model": Path(arguments.model_name_or_path).name,
        "weights": hash_of_weights(load_masked_model(arguments.model_name_or_path)),
        "pseudo_perplexity": {name: value for name, value in perplexity.items() if name not in here},
        "glue": [{name: value for name, value in task.items() if name not in here} for task in fine_tune(arguments)],
        "learning_rate": arguments.learning_rate,
        "max_steps": arguments.max_steps,
        "dtype": str(best_dtype("cuda" if torch.cuda.is_available() else "cpu")).removeprefix("torch."),
        **environment(),
    }
    write_json(out / "evaluation.json", result)
    plot({"tasks": result["glue"]}).savefig(out / "glue.png", dpi=150)
    return evaluation_sections(result, out)


def run(arguments: EvaluationArguments):
    """Evaluate, print the tables, and write report and card."""
    with lock_run(arguments.output_dir):
        parts = evaluate(arguments)
    for part in parts:
        print(f"\n{part.title}\n\n{tabulate(part.rows, headers='keys')}")
    if arguments.report:
        print(f"\n{write_page(arguments.report, f'Evaluation of {Path(arguments.model_name_or_path).name}', parts)}")
    if arguments.card:
        write_card_section(arguments.card, parts)


def main():
    """Read the command line, and evaluate."""
    parser = CommandParser(EvaluationArguments, description=__doc__)
    run_command(parser.prog, run, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
