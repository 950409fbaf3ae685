"""Fine-tuning of the mini model beside models of the same size, under equal conditions.

    python benchmarks/finetuning.py --data_dir glue --output_dir runs/finetuning --json benchmarks/results/finetuning_cpu.json

Every model has the same tokenizer, width, depth, data and steps. For each task and model, the learning rate is the best of
`--learning_rates` with the first seed; all seeds run with it. `--pretrained` adds other models; finetuning.sh pretrains a NeoBERT
and a pre-norm RoBERTa by the same recipe on the same corpus, and adds them.
"""

from dataclasses import dataclass, field
from pathlib import Path

from harness import finish
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer, HfArgumentParser, set_seed
from transformers.utils import logging

from neobert_hf import MINI_MODEL_PATH, tune_allocator
from neobert_hf.evaluation.glue import TASKS
from neobert_hf.evaluation.glue_runs import SHORT_RUN, SHORT_TASKS, GlueArguments, GlueTrainingArguments, run_suite

RANDOM = {"BERT, random": "bert"}


@dataclass
class FineTuningArguments:
    """Arguments of the benchmark."""

    data_dir: str = field(metadata={"help": "Folder with CoLA, SST-2 and STS-B."})
    output_dir: str = field(metadata={"help": "Folder of the runs; finished ones are not repeated."})
    model: str = field(default=str(MINI_MODEL_PATH), metadata={"help": "The pretrained NeoBERT."})
    pretrained: list[str] = field(
        default_factory=list, metadata={"help": "Other models, each as NAME=FOLDER; the names stand in the table."}
    )
    tasks: list[str] = field(default_factory=lambda: list(SHORT_TASKS), metadata={"help": "Tasks of GLUE."})
    learning_rates: list[float] = field(default_factory=lambda: [1e-4, 3e-4], metadata={"help": "Candidates."})
    seeds: int = field(default=3, metadata={"help": "Number of seeds."})
    max_steps: int = field(default=SHORT_RUN["max_steps"], metadata={"help": "Steps of a run."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def random_peer(model_type: str, model: str, folder: Path) -> str:
    """Save a model of the pretrained model's width and depth with random weights, and return its folder."""
    if not (folder / "config.json").is_file():
        tokenizer, shape = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        values = {name: getattr(shape, name) for name in names}
        # RoBERTa counts positions from pad_token_id + 1
        positions = shape.max_position_embeddings + shape.pad_token_id + 1
        config = AutoConfig.for_model(
            model_type, **values, max_position_embeddings=positions, pad_token_id=shape.pad_token_id
        )
        set_seed(0)
        AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def num_parameters(folder: str) -> int:
    """Return the number of parameters of the encoder."""
    return AutoModel.from_config(AutoConfig.from_pretrained(folder)).num_parameters()


def main():
    """Run every task for every model."""
    (arguments,) = HfArgumentParser(FineTuningArguments).parse_args_into_dataclasses()
    tune_allocator()
    logging.disable_progress_bar()
    out = Path(arguments.output_dir)
    models = {"mini NeoBERT, pretrained": arguments.model}
    models |= {name: random_peer(kind, arguments.model, out / "random" / kind) for name, kind in RANDOM.items()}
    models |= dict(named.split("=", 1) for named in arguments.pretrained)
    rows = []
    for task in arguments.tasks:
        for name, model in models.items():
            folder = out / name.replace(", ", "-").replace(" ", "-")

            def run(rate, seeds, task=task, model=model, folder=folder):
                training = GlueTrainingArguments(
                    output_dir=str(folder / f"{rate:g}"),
                    learning_rate=rate,
                    max_steps=arguments.max_steps,
                    eval_steps=min(SHORT_RUN["eval_steps"], arguments.max_steps),
                    auto_precision=True,
                    use_cpu=True,
                    disable_tqdm=True,
                )
                options = dict(
                    data_dir=arguments.data_dir, preset="none", seeds=seeds, transfer=False, max_seq_length=128
                )
                return run_suite(GlueArguments(model, [task], **options), training)["tasks"][0]

            rates = arguments.learning_rates
            best = max(rates, key=lambda rate: run(rate, 1)["mean"]) if len(rates) > 1 else rates[0]
            result = run(best, arguments.seeds)
            rows.append(
                {
                    "task": task,
                    "metric": " and ".join(TASKS[task].metrics),
                    "model": name,
                    "num_parameters": num_parameters(model),
                    "learning_rate": best,
                    "mean": result["mean"],
                    "standard_deviation": result["standard_deviation"],
                    "seeds": len(result["scores"]),
                }
            )
            print(rows[-1], flush=True)
    arguments.pretrained = [named.split("=", 1)[0] for named in arguments.pretrained]
    finish("finetuning", rows, arguments)


if __name__ == "__main__":
    main()
