"""Evaluate embedding models on a benchmark of mteb; by default on MTEB(eng, v1) as in the paper, with the means of its Table 4.

    python examples/paper/evaluate_mteb.py --model runs/embeddings --output_dir runs/mteb --tasks STS12 SciFact
    python examples/paper/evaluate_mteb.py --models runs/embeddings mteb/baseline-bm25s --benchmark NanoBEIR --output_dir runs/n

Rerun the command to resume: tasks whose results for the same model and prompts are in the output folder do not run again. The
datasets are downloaded from the Hub and kept in the cache of Hugging Face. A task that cannot run is named in a line, the others
run, and the exit status is 1. The benchmark NeoBERT(offline) needs no network: see offline_tasks.py.
`--prompts auto` is the model's own prompts if it has some, else the paper's for a NeoBERT, and none for another model.
"""

# ruff: noqa: RUF009  (HfArg returns a field)
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import mteb
import torch
from evaluation_report import mteb_tables
from mteb_scores import BENCHMARK, about, averages, benchmark_tasks, evaluate, names_of, prompts_for, write_model_index
from offline_tasks import OFFLINE, offline_benchmark
from transformers.hf_argparser import HfArg

from neobert_hf import __version__, best_dtype
from neobert_hf.embeddings import open_embedding_model
from neobert_hf.runs import environment, lock_run, run_script

sys.path.append(str(Path(__file__).with_name("contextual")))  # its import registers contextual models
from contextual_mteb import in_contexts


@dataclass
class MTEBArguments:
    """Evaluation."""

    models: list[str] = HfArg(aliases=["--model"], help="Folders or Hub ids of embedding models; mteb/baseline-bm25s.")
    output_dir: str = HfArg(help="Folder of the results; rerun the command to resume.")
    model_names: list[str] = HfArg(default=None, aliases=["--model_name"], help="Default: local/ and the folders.")
    benchmark: str = HfArg(default=BENCHMARK, help=f"Name of a benchmark of mteb, or {OFFLINE}.")
    data_dir: str = HfArg(default=None, help=f"Folder of GLUE's original files, for {OFFLINE}.")
    tasks: list[str] = HfArg(default=None, help="Tasks of the benchmark. Default: all.")
    prompts: Literal["auto", "paper", "model", "none"] = HfArg(default="auto", help="Prompts; see above.")
    instruction_template: str = HfArg(default="{instruction} ", help="Text before each input, for the paper's prompts.")
    instruction_sides: Literal["both", "query"] = HfArg(default="both", help="query: documents have no instruction.")
    without_instructions: bool = HfArg(default=False, help="As --prompts none.")
    dtype: Literal["float16", "bfloat16", "float32"] = HfArg(default=None, help="Default: float16; CPU: its fastest.")
    revision: str = HfArg(default=None, help="Branch, tag or commit of a model on the Hub.")
    batch_size: int = HfArg(default=32, help="Number of texts in a batch.")
    max_seq_length: int = HfArg(default=None, help="Longest text in tokens. Default: the model's.")
    card: str = HfArg(default=None, help="README.md of the model, whose metadata gets the scores.")


def run(arguments: MTEBArguments):
    """Evaluate, print, and write scores.json."""
    # 1. Names, tasks, dtype.
    names = names_of(arguments.models, arguments.model_names)
    if len(names) > 1 and (arguments.revision or arguments.card):
        raise ValueError("--revision and --card belong to one model; evaluate the models in several commands")
    benchmark = offline_benchmark(arguments.data_dir) if arguments.benchmark == OFFLINE else arguments.benchmark
    tasks = benchmark_tasks(arguments.tasks, benchmark)
    fastest = torch.float16 if torch.cuda.is_available() else best_dtype(torch.device("cpu"))
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else fastest
    versions = {"dtype": str(dtype).removeprefix("torch."), "neobert_hf": __version__, "mteb": mteb.__version__}
    result = {"benchmark_name": arguments.benchmark, "models": [], **about(tasks), **versions, **environment()}
    file = Path(arguments.output_dir, "scores.json")
    with lock_run(arguments.output_dir):
        for source, name in zip(arguments.models, names):
            # 2. A model, its prompts, its scores.
            if source.startswith("mteb/baseline-"):
                model = mteb.get_model(source)
            else:
                model = open_embedding_model(source, arguments.revision, model_kwargs={"dtype": dtype})
                model.max_seq_length = arguments.max_seq_length or model.max_seq_length
            choice = "none" if arguments.without_instructions else arguments.prompts
            form = arguments.instruction_template, arguments.instruction_sides
            said, prompts = prompts_for(model, tasks, choice, *form)
            row = {"model": name, "revision": arguments.revision, "prompts": said, "without_score": {}}
            with in_contexts(model, tasks) as wrapper_class:
                options = (arguments.output_dir, name, prompts, arguments.batch_size, wrapper_class)
                scores = evaluate(model, tasks, *options, on_missing=row["without_score"].__setitem__)
            row["averages"], row["missing"] = averages(scores, benchmark_tasks(None, benchmark))
            result["models"].append(row | {"scores": list(map(asdict, scores))})
            file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
            if arguments.card:
                write_model_index(arguments.card, name, scores)
    print(mteb_tables(result))
    if any(row["without_score"] for row in result["models"]):
        sys.exit("evaluate_mteb.py: some scores are missing, for the reasons above")


def main():
    """Read the command line, and run."""
    run_script(run, __doc__)


if __name__ == "__main__":
    main()
