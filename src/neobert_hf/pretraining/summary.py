"""Summary of a finished pretraining: its figures, its curves, and the record for the model card."""

import os
from importlib.metadata import version
from pathlib import Path

import numpy as np
import yaml
from transformers import Trainer

from ..checkpoints.record import write_record
from ..files.messages import say_next
from ..files.output import write_json, writing
from ..runs import environment
from ..runs.resume import RECIPE, SUMMARY

FIGURES = ("steps", "num_tokens", "num_masked", "precision", "devices")  # on the card, beside the record
FIGURES_OF_LOG = ("num_tokens", "num_masked", "loss", "perplexity", "masked_accuracy")
COUNTS = "pretraining"  # the sums of a run, in the state of a checkpoint
HELD_OUT_METRICS = ("eval_loss", "eval_perplexity", "eval_masked_accuracy")


def write_summary(trainer: Trainer, run: dict, held_out: dict, record: dict) -> dict:
    """Write `training_summary.json`, `recipe.yaml`, and `training.json` for the model card; return the summary."""
    training, state = trainer.args, trainer.state
    folder = Path(training.output_dir)
    machine = environment()
    versions = machine.pop("versions")
    logs = [entry for entry in state.log_history if "masked_accuracy" in entry]
    last = logs[-1]
    # ZeRO-3 leaves empty tensors in place of parameters
    sizes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in trainer.model.parameters()]
    precision = trainer.accelerator.mixed_precision
    summary = {
        **run,
        "num_parameters": sum(sizes),
        "steps": state.global_step,
        **{name: last[name] for name in FIGURES_OF_LOG},
        **held_out,
        "tokens_per_s": float(np.median([entry["tokens_per_s"] for entry in logs])),
        "packing_efficiency": last["num_tokens"] / (state.global_step * training.tokens_per_step),
        "training_seconds": trainer.seconds,
        "devices": trainer.accelerator.num_processes,
        "precision": "fp32" if precision == "no" else precision,
        "machine": machine,
        "versions": versions | {"neobert_hf": version("neobert_hf")},
    }
    with writing(folder / RECIPE) as file:
        file.write(as_yaml(record).encode())
    write_json(folder / SUMMARY, summary)
    _write_record(training, summary, record)
    return summary


def say_pretrained(folder: str) -> None:
    """Tell the command that may follow a pretraining."""
    words = "--train_file TRAIN.csv --text_columns TEXT --label_column LABEL --output_dir runs/classes"
    say_next(["neobert", "finetune-classifier", "--model_name_or_path", folder, *words.split()])


def _write_record(training, summary, record):
    data, machine = summary["data"], summary["machine"]
    source = data.get("source", data)
    dataset = source.get("dataset_name")
    names = [file["name"] for file in source.get("files", ())] or [dataset]
    count = data.get("num_documents") if len(names) == 1 else None
    values = record | record["run"]
    del values["run"]
    settings = {name: _public(value) for name, value in values.items()}
    settings |= {name: summary[name] for name in FIGURES}
    settings["versions"] = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    settings["machine"] = machine["gpu"] or f"{machine['processor']} ({machine['instructions']})"
    settings["time"] = f"{summary['training_seconds']:.0f} s"
    scores = []
    if "eval_loss" in summary:
        metrics = {name.removeprefix("eval_"): summary[name] for name in HELD_OUT_METRICS}
        trivial = {"masked_accuracy": summary["eval_trivial_masked_accuracy"]}
        scores.append({"dataset": "held-out documents", "split": "validation", "metrics": metrics, "trivial": trivial})
    is_on_hub = dataset and not Path(dataset).is_dir()
    write_record(
        training.output_dir,
        training,
        source=training.init_from,
        rows=dict.fromkeys(names, count),
        datasets=[dataset] if is_on_hub else [],
        scores=scores,
        settings=settings,
    )


def _public(value):
    """A value as a public card shows it: files and folders have their names alone."""
    if isinstance(value, list):
        return ", ".join(str(_public(item)) for item in value)
    if isinstance(value, str) and os.path.exists(value):
        return Path(value).name
    return value


def as_yaml(record: dict) -> str:
    """Return a record as the content of `recipe.yaml`."""
    return yaml.safe_dump(record, sort_keys=False)
