"""Evaluate an embedding model on MTEB(eng, v1) with the paper's instructions, and average as in its Table 4.

    python examples/paper/evaluate_mteb.py --model runs/embeddings --output_dir runs/mteb
    python examples/paper/evaluate_mteb.py --model runs/embeddings --output_dir runs/mteb --tasks STS12 SciFact

Rerun the command to resume: tasks whose results for the same model and prompts are in the output folder do not run again. The
datasets of the tasks are downloaded from the Hub and kept in the cache of Hugging Face.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from mteb_scores import averages, benchmark_tasks, evaluate, mteb_prompts, write_model_index
from tabulate import tabulate

from neobert_hf import __version__, best_dtype
from neobert_hf.embeddings import open_embedding_model
from neobert_hf.files import replacing
from neobert_hf.runs import run_script

sys.path.append(str(Path(__file__).with_name("contextual")))  # its import registers contextual models
from contextual_mteb import in_contexts


@dataclass
class MTEBArguments:
    """Evaluation."""

    model: str = field(metadata={"help": "Folder or Hub id of a model of sentence-transformers, or of a bare NeoBERT."})
    output_dir: str = field(metadata={"help": "Folder of the results; rerun the command to resume."})
    model_name: str = field(default=None, metadata={"help": "Name of the results. Default: local/ and the folder."})
    tasks: list[str] = field(default=None, metadata={"help": "Tasks of MTEB(eng, v1). Default: all 56."})
    instruction_template: str = field(
        default="{instruction} ", metadata={"help": "Text before each input; {instruction} is replaced."}
    )
    instruction_sides: Literal["both", "query"] = field(
        default="both", metadata={"help": "both: queries and documents have the instruction; query: queries only."}
    )
    without_instructions: bool = field(default=False, metadata={"help": "Put nothing before the texts."})
    dtype: Literal["float16", "bfloat16", "float32"] = field(
        default=None,
        metadata={"help": "Default: float16 on a GPU, as in the paper, and on a CPU the fastest one that it has."},
    )
    revision: str = field(default=None, metadata={"help": "Branch, tag or commit of a model on the Hub."})
    batch_size: int = field(default=32, metadata={"help": "Number of texts in a batch."})
    max_seq_length: int = field(default=None, metadata={"help": "Longest text in tokens. Default: the model's."})
    card: str = field(default=None, metadata={"help": "README.md of the model, whose metadata gets the scores."})


def run(arguments: MTEBArguments):
    """Evaluate, print, and write scores.json."""
    file = Path(arguments.output_dir, "scores.json")
    with replacing(file, writer="evaluate_mteb.py"):
        # 1. Tasks and prompts.
        tasks = benchmark_tasks(arguments.tasks)
        sides = arguments.instruction_sides
        prompts = {} if arguments.without_instructions else mteb_prompts(arguments.instruction_template, sides)
        name = arguments.model_name or f"local/{Path(arguments.model).resolve().name}"

        # 2. The model.
        fastest = torch.float16 if torch.cuda.is_available() else best_dtype(torch.device("cpu"))
        dtype = getattr(torch, arguments.dtype) if arguments.dtype else fastest
        model = open_embedding_model(arguments.model, arguments.revision, model_kwargs={"dtype": dtype})
        model.max_seq_length = arguments.max_seq_length or model.max_seq_length

        # 3. Evaluation, tables, results.
        with in_contexts(model, tasks) as wrapper_class:
            scores = evaluate(model, tasks, arguments.output_dir, name, prompts, arguments.batch_size, wrapper_class)
        means, missing = averages(scores)
        rows = [(score.task, score.metric, score.score) for score in scores]
        print(tabulate(rows, headers=["task", "metric", "score"], floatfmt=".2f"))
        print(tabulate([means], headers="keys", floatfmt=".2f", missingval="-"))
        if missing:
            print(f"averages are incomplete without these tasks: {', '.join(missing)}")
        result = {
            "model": name,
            "revision": arguments.revision,
            "dtype": str(dtype).removeprefix("torch."),
            "neobert_hf": __version__,
            "averages": means,
            "missing": missing,
            "scores": list(map(asdict, scores)),
            "dataset_revisions": {task.metadata.name: task.metadata.dataset["revision"] for task in tasks},
        }
        file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        if arguments.card:
            write_model_index(arguments.card, name, scores)


def main():
    """Read the command line, and run."""
    run_script(run, __doc__)


if __name__ == "__main__":
    main()
