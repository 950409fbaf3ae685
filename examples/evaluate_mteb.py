"""Evaluate an embedding model on MTEB(eng, v1) with the paper's instructions, and average as in its Table 4.

    python examples/evaluate_mteb.py --model runs/embeddings --output_dir runs/mteb
    python examples/evaluate_mteb.py --model runs/embeddings --output_dir runs/mteb --tasks STS12 SciFact

After an interruption, the same command resumes: it does not run tasks again whose results for the same model and prompts are in
the output folder. The datasets of the tasks are downloaded from the Hub and kept in the cache of Hugging Face.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tabulate import tabulate

import neobert_hf  # registers the model with the Auto classes
from neobert_hf.embeddings.instructions import mteb_prompts
from neobert_hf.embeddings.models import open_embedding_model
from neobert_hf.evaluation.cards import load_card
from neobert_hf.evaluation.mteb import (
    BENCHMARK,
    DTYPES,
    averages,
    benchmark_tasks,
    check_model_name,
    evaluate,
    write_model_index,
)
from neobert_hf.runs.commands import CommandParser, run_command


@dataclass
class MTEBArguments:
    """Evaluation."""

    model: str = field(metadata={"help": "Folder or Hub id of a model of sentence-transformers, or of a bare NeoBERT."})
    output_dir: str = field(metadata={"help": "Folder of the results; the same command again resumes."})
    model_name: str = field(
        default=None,
        metadata={
            "help": "Name of the results, organisation/name; without it, local/ and the name of the model's folder."
        },
    )
    tasks: list[str] = field(default=None, metadata={"help": f"Tasks of {BENCHMARK}; without it, all 56."})
    instruction_template: str = field(
        default="{instruction} ", metadata={"help": "Text put before each text; {instruction} is replaced."}
    )
    instruction_sides: str = field(
        default="both", metadata={"help": "both: queries and documents get the instruction; query: queries only."}
    )
    without_instructions: bool = field(default=False, metadata={"help": "Put nothing before the texts."})
    dtype: str = field(
        default=None,
        metadata={
            "help": f"{', '.join(DTYPES)}. Default: float16 on a GPU, as in the paper, and on a CPU the fastest one that it has."
        },
    )
    revision: str = field(default=None, metadata={"help": "Branch, tag or commit of a model on the Hub."})
    batch_size: int = field(default=32, metadata={"help": "Number of texts in a batch."})
    max_seq_length: int = field(
        default=None, metadata={"help": "Maximum length of a text in tokens; without it, the model's."}
    )
    card: str = field(
        default=None, metadata={"help": "README.md of the model; the scores are written into its metadata."}
    )

    def __post_init__(self):
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        mteb_prompts(self.instruction_template, self.instruction_sides)
        benchmark_tasks(self.tasks)
        self.model_name = self.model_name or f"local/{Path(self.model).resolve().name}"
        check_model_name(self.model_name)


def run(arguments: MTEBArguments):
    """Evaluate, print, and write scores.json."""
    prompts = {}
    if not arguments.without_instructions:
        prompts = mteb_prompts(arguments.instruction_template, arguments.instruction_sides)
    tasks, name = benchmark_tasks(arguments.tasks), arguments.model_name
    if arguments.card:
        load_card(arguments.card)  # an error in the card is found before the work
    fastest = torch.float16 if torch.cuda.is_available() else neobert_hf.best_dtype(torch.device("cpu"))
    dtype = DTYPES[arguments.dtype] if arguments.dtype else fastest
    model = open_embedding_model(arguments.model, arguments.revision, model_kwargs={"dtype": dtype})
    if arguments.max_seq_length:
        model.max_seq_length = arguments.max_seq_length

    try:
        scores = evaluate(model, tasks, arguments.output_dir, name, prompts, arguments.batch_size)
    except ConnectionError as error:
        raise ConnectionError(
            f"the dataset of a task could not be downloaded: {error}. Run the same command with a network and without "
            "HF_HUB_OFFLINE=1 to cache it, or choose tasks whose datasets are cached with --tasks"
        ) from error
    means, missing = averages(scores)
    print(tabulate([(s.task, s.metric, s.score) for s in scores], headers=["task", "metric", "score"], floatfmt=".2f"))
    print(tabulate([means], headers="keys", floatfmt=".2f", missingval="-"))
    if missing:
        print(f"averages are incomplete without these tasks: {', '.join(missing)}")
    result = {
        "model": name,
        "revision": arguments.revision,
        "dtype": str(dtype).removeprefix("torch."),
        "neobert_hf": neobert_hf.__version__,
        "averages": means,
        "missing": missing,
        "scores": list(map(asdict, scores)),
        "dataset_revisions": {task.metadata.name: task.metadata.dataset["revision"] for task in tasks},
    }
    Path(arguments.output_dir, "scores.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if arguments.card:
        write_model_index(arguments.card, name, scores)


def main():
    """Read the command line, and run."""
    parser = CommandParser(MTEBArguments, description=__doc__)
    run_command(parser.prog, run, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
