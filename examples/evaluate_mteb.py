"""Evaluate an embedding model on MTEB(eng, v1) with the paper's instructions, and average as in its Table 4.

    python examples/evaluate_mteb.py --model runs/embeddings --output_dir runs/mteb
    python examples/evaluate_mteb.py --model runs/embeddings --output_dir runs/mteb --tasks STS12 SciFact

It goes on after an interruption: what the output folder holds of the same model and prompts is not run again.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from sentence_transformers import SentenceTransformer
from tabulate import tabulate

import neobert_hf  # registers the model with the Auto classes
from neobert_hf.commands import Bounds, CommandParser, run_command
from neobert_hf.embeddings.instructions import mteb_prompts
from neobert_hf.evaluation.mteb import (
    BENCHMARK,
    DTYPES,
    averages,
    benchmark_tasks,
    check_model_name,
    evaluate,
    write_model_index,
)


@dataclass
class MTEBArguments:
    """What to evaluate, on what, how."""

    model: str = field(metadata={"help": "A folder of sentence-transformers or its id on the Hub, or a bare NeoBERT."})
    output_dir: str = field(metadata={"help": "Folder of the results; run the same again to go on."})
    model_name: str = field(
        default=None, metadata={"help": "organisation/name; by default local/ and the folder's name."}
    )
    tasks: list[str] = field(default=None, metadata={"help": f"Tasks of {BENCHMARK}; all 56."})
    instruction_template: str = field(default="{instruction} ", metadata={"help": "What is put before a text."})
    instruction_sides: str = field(default="both", metadata={"help": "both, or query: documents get none."})
    without_instructions: bool = field(default=False, metadata={"help": "Embed the texts alone."})
    dtype: str = field(default="float16", metadata={"help": f"Of {', '.join(DTYPES)}; the paper's is float16."})
    batch_size: Annotated[int, Bounds(1, 1 << 20)] = field(
        default=32, metadata={"help": "Texts that are embedded at once."}
    )
    max_seq_length: Annotated[int, Bounds(3, 1 << 20)] = field(
        default=None, metadata={"help": "Where texts are cut, in tokens; the model's own."}
    )
    card: str = field(default=None, metadata={"help": "README.md of the model, to write the scores into."})

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is none of {', '.join(DTYPES)}")
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
    if arguments.card and not Path(arguments.card).is_file():
        raise FileNotFoundError(f"there is no card {arguments.card} to write the scores into")
    model = SentenceTransformer(arguments.model, model_kwargs={"dtype": DTYPES[arguments.dtype]})
    if arguments.max_seq_length:
        model.max_seq_length = arguments.max_seq_length

    scores = evaluate(model, tasks, arguments.output_dir, name, prompts, arguments.batch_size)
    means, missing = averages(scores)
    print(tabulate([(s.task, s.metric, s.score) for s in scores], headers=["task", "metric", "score"], floatfmt=".2f"))
    print(tabulate([means], headers="keys", floatfmt=".2f", missingval="-"))
    if missing:
        print(f"not in this run, so in no average: {', '.join(missing)}")
    result = {
        "model": name,
        "neobert_hf": neobert_hf.__version__,
        "averages": means,
        "missing": missing,
        "scores": list(map(asdict, scores)),
    }
    Path(arguments.output_dir, "scores.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if arguments.card:
        write_model_index(arguments.card, name, scores)


def main():
    """Read the command line, and run."""
    parser = CommandParser(MTEBArguments, description=MTEBArguments.__doc__)
    run_command(parser.prog, run, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
