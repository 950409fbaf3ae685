"""Fine-tuning runs of GLUE by the paper's protocol (appendix C): search, seeds, transfer from MNLI, one table."""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
    SchedulerType,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..commands import Bounds
from ..data.files import write_json
from ..training_arguments import FINE_TUNING_BOUNDS, PrecisionArguments
from .glue import AVERAGED, FROM_MNLI, GRID, PRESETS, TASKS, GlueTask, average, load_task, task_metrics

SUMMARY, RESULT, MODEL = "glue.json", "result.json", "model"  # of a suite; of a run
PATIENCE = 15  # evaluations without improvement (appendix C)
# A short evaluation of a small model on a CPU.
SHORT_TASKS, SHORT_RUN = ("sst2", "cola", "stsb"), {"max_steps": 900, "eval_steps": 300}
# Arguments that determine a result, beside the setting and the seed; a result of other arguments is not reused.
PROTOCOL = ("num_train_epochs", "max_steps", "eval_steps", "warmup_steps", "gradient_accumulation_steps")
PROTOCOL += ("bf16", "fp16", "optim")


@dataclass
class GlueArguments:
    """Tasks, data and search."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of any encoder with its tokenizer."})
    tasks: list[str] = field(
        default_factory=lambda: list(AVERAGED), metadata={"help": f"Any of {', '.join(TASKS)}. Default: all but WNLI."}
    )
    data_dir: str = field(
        default=None,
        metadata={
            "help": "Folder with the original files: of one task, or folders named CoLA, SST-2, ... Default: the Hub."
        },
    )
    preset: str = field(
        default="NeoBERT-4096",
        metadata={"help": f"Batch size, learning rate and weight decay of Table 6: {', '.join(PRESETS)}; or none."},
    )
    grid: bool = field(default=False, metadata={"help": "Search the paper's grid of 60 settings with the first seed."})
    seeds: Annotated[int, Bounds(1, 1000)] = field(default=1, metadata={"help": "Number of seeds of the setting."})
    transfer: bool = field(
        default=True, metadata={"help": f"{', '.join(FROM_MNLI)} start from the best MNLI run of this suite."}
    )
    max_seq_length: Annotated[int, Bounds(3, 1 << 20)] = field(
        default=512, metadata={"help": "Length in tokens at which texts are truncated."}
    )

    def __post_init__(self):
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"tasks: {', '.join(unknown)} is not one of {', '.join(TASKS)}")
        if self.preset not in (*PRESETS, "none"):
            raise ValueError(f"preset={self.preset!r} is not one of {', '.join(PRESETS)}, none")


@dataclass
class GlueTrainingArguments(PrecisionArguments, TrainingArguments):
    """Training arguments; the defaults are the paper's protocol."""

    BOUNDS: ClassVar = FINE_TUNING_BOUNDS

    num_train_epochs: float = 10
    warmup_steps: float = 0.06  # share of all steps, as in the authors' code
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 64
    learning_rate: float = 1e-5
    weight_decay: float = 0.01
    logging_strategy: str = "no"
    report_to: str = "none"


def run_suite(arguments: GlueArguments, training: GlueTrainingArguments) -> dict:
    """Run all tasks, and write glue.json; runs whose results are in the output folder are not run again.

    MNLI comes first, since other tasks start from its best run. Only the best run of each task keeps its weights.

    Args:
        arguments: Tasks, data and search.
        training: Training arguments; a preset or the grid replaces batch size, learning rate and weight decay.

    Returns:
        Name of the model, its average over the tasks of the paper (None if one is missing), and for each task the start, the
        best setting, the scores of the seeds, their mean and standard deviation, and the metrics of the best run.

    Raises:
        ValueError: A file is damaged, the output folder has results of other arguments, or the model has no classifier.
        OSError: A file is missing.
    """
    tasks, best_mnli = [], None
    for name in sorted(arguments.tasks, key=lambda each: each != "mnli"):
        task, data = TASKS[name], load_task(TASKS[name], arguments.data_dir)
        start = best_mnli if best_mnli and name in FROM_MNLI else arguments.model_name_or_path

        def run(setting, seed, task=task, data=data, start=start):
            changed = copy.copy(training)
            vars(changed).update(setting, seed=seed)
            return _finished_run(arguments, task, data, start, changed)

        searched = [run(setting, training.seed) for setting in _settings(arguments, name, training)]
        setting = max(searched, key=_score)["setting"]
        of_setting = [run(setting, training.seed + i) for i in range(arguments.seeds)]
        best = max(of_setting, key=_score)
        for result in (*searched, *of_setting):
            if result["folder"] != best["folder"]:
                shutil.rmtree(Path(result["folder"], MODEL), ignore_errors=True)
        scores = list(map(_score, of_setting))
        tasks.append(
            {
                "task": name,
                "start": start,
                "setting": setting,
                "scores": scores,
                "mean": statistics.mean(scores),
                "standard_deviation": statistics.stdev(scores) if len(scores) > 1 else None,
                "metrics": best["metrics"],
                "model": str(Path(best["folder"], MODEL)),
            }
        )
        if name == "mnli" and arguments.transfer:
            best_mnli = tasks[-1]["model"]
        means = {each["task"]: each["mean"] for each in tasks}
        summary = {"model": arguments.model_name_or_path, "average": average(means), "tasks": tasks}
        write_json(Path(training.output_dir, SUMMARY), summary)
    return summary


def _score(result: dict) -> float:
    return result["metrics"]["score"]


def _settings(arguments: GlueArguments, name: str, training: GlueTrainingArguments) -> list[dict]:
    """Batch size, learning rate and weight decay of each run of the search."""
    if arguments.grid:
        return [dict(zip(GRID, values)) for values in itertools.product(*GRID.values())]
    if name in PRESETS.get(arguments.preset, ()):
        return [dict(zip(GRID, PRESETS[arguments.preset][name]))]
    return [{each: getattr(training, each) for each in GRID}]


def _finished_run(arguments, task, data, start, training) -> dict:
    """The result of a run, from its folder if it is there."""
    setting = {name: getattr(training, name) for name in GRID}
    folder = Path(
        training.output_dir, task.name, "-".join(f"{value:g}" for value in (*setting.values(), training.seed))
    )
    run = {
        "model": start,
        "max_seq_length": arguments.max_seq_length,
        "rows": {split: len(rows) for split, rows in data.items()},
        **{name: value for name, value in training.to_dict().items() if name in PROTOCOL},
    }
    try:
        result = json.loads(Path(folder, RESULT).read_text("utf-8"))
    except FileNotFoundError:
        metrics = fine_tune(task, data, start, folder, training, arguments.max_seq_length)
        result = {"run": run, "folder": str(folder), "setting": setting, "metrics": metrics}
        write_json(Path(folder, RESULT), result)
    if different := sorted(name for name in run if result["run"].get(name) != run[name]):
        raise ValueError(
            f"{folder} has the result of a run with {different[0]}={result['run'].get(different[0])!r}, not "
            f"{run[different[0]]!r}; choose another --output_dir, or remove that folder"
        )
    return result


def fine_tune(
    task: GlueTask,
    data: dict[str, Dataset],
    start: str,
    folder: Path,
    training: GlueTrainingArguments,
    max_seq_length: int = 512,
) -> dict[str, float]:
    """Fine-tune a model for one task, and save the best checkpoint in the folder `model` inside `folder`.

    The schedule is the authors': linear warmup, then linear decay to a tenth of the peak; the warmup begins at a tenth too,
    since this schedule of transformers does. The model is evaluated every `eval_steps`, without a value every
    min(500, batches / 10) steps; training ends after 15 evaluations without improvement. A classifier of another task is replaced
    by a new one, and the layer before it is kept.

    Returns:
        Metrics of the best checkpoint by name, and `score`, their mean, each over all validation splits.
    """
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(start)

    def tokenize(rows):
        return tokenizer(*(rows[column] for column in task.texts), truncation=True, max_length=max_seq_length)

    tokens = {split: rows.map(tokenize, batched=True, remove_columns=list(task.texts)) for split, rows in data.items()}
    names = dict(enumerate(task.classes or ["score"]))
    options = {"id2label": names, "label2id": {name: i for i, name in names.items()}, "dtype": torch.float32}
    model = AutoModelForSequenceClassification.from_pretrained(start, **options, ignore_mismatched_sizes=True)

    validation = [tokens[split] for split in task.validation]
    ends = list(itertools.accumulate(map(len, validation)))

    def metrics(predictions):
        parts = zip(np.split(predictions.predictions, ends[:-1]), np.split(predictions.label_ids, ends[:-1]))
        of_splits = [task_metrics(task, *part) for part in parts]
        return {name: statistics.mean(each[name] for each in of_splits) for name in of_splits[0]}

    training = copy.copy(training)
    batches = math.ceil(len(tokens["train"]) / training.train_batch_size)
    updates = math.ceil(batches / training.gradient_accumulation_steps)
    steps = training.max_steps if training.max_steps > 0 else math.ceil(updates * training.num_train_epochs)
    interval = training.eval_steps or max(1, min(500, batches // 10))
    share = training.warmup_steps  # transformers 4 has no shares of the steps
    warmup = math.ceil(share * steps) if share < 1 else int(share)
    vars(training).update(
        warmup_steps=warmup,
        output_dir=str(folder),
        eval_strategy=IntervalStrategy.STEPS,
        eval_steps=interval,
        save_strategy=SaveStrategy.STEPS,
        save_steps=interval,
        save_total_limit=1,
        save_only_model=True,
        load_best_model_at_end=True,
        metric_for_best_model="eval_score",
        greater_is_better=True,
        lr_scheduler_type=SchedulerType.WARMUP_STABLE_DECAY,
        lr_scheduler_kwargs={"num_decay_steps": steps - warmup, "decay_type": "linear", "min_lr_ratio": 0.1},
    )
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    trainer = Trainer(
        model,
        training,
        train_dataset=tokens["train"],
        eval_dataset=concatenate_datasets(validation),
        processing_class=tokenizer,
        compute_metrics=metrics,
        callbacks=[EarlyStoppingCallback(PATIENCE)],
    )
    trainer.train()
    result = trainer.evaluate()
    trainer.save_model(str(folder / MODEL))
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return {name: result[f"eval_{name}"] for name in (*task.metrics, "score")}
