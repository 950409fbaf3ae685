"""Fine-tuning runs of GLUE by the paper's protocol (appendix C): search, seeds, transfer from MNLI, one table."""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from evaluation_report import glue_table, plot_glue
from glue import AVERAGED, FROM_MNLI, GRID, PRESETS, TASKS, GlueTask, average, load_task, task_metrics
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    SchedulerType,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from neobert_hf.checkpoints import load_tokenizer
from neobert_hf.data import check_leaves_tokens, check_max_length
from neobert_hf.files import content_hash, file_hash, write_json
from neobert_hf.runs import PrecisionArguments

PATIENCE = 15  # evaluations without improvement (appendix C)
# Training arguments of every run.
PROTOCOL = {
    "eval_strategy": IntervalStrategy.STEPS,
    "save_strategy": SaveStrategy.STEPS,
    "save_total_limit": 1,
    "save_only_model": True,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_score",
    "greater_is_better": True,
    "lr_scheduler_type": SchedulerType.WARMUP_STABLE_DECAY,
}
# Training arguments that do not decide a result.
OF_THE_MACHINE = ("output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "log_level")


@dataclass
class GlueArguments:
    """Tasks, data and search."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of any encoder with its tokenizer."})
    tasks: list[str] = field(
        default_factory=lambda: list(AVERAGED), metadata={"help": f"Any of {', '.join(TASKS)}. Default: all but WNLI."}
    )
    data_dir: str = field(
        default=None,
        metadata={"help": "Folder with the original folders CoLA, SST-2, ... Default: the rows of the Hub."},
    )
    preset: Literal["NeoBERT-1024", "NeoBERT-4096", "none"] = field(
        default="NeoBERT-4096",
        metadata={"help": "Column of Table 6 with batch size, learning rate and weight decay; none: the given values."},
    )
    grid: bool = field(default=False, metadata={"help": "Search the paper's grid of 60 settings with the first seed."})
    seeds: int = field(default=1, metadata={"help": "Number of seeds of the setting."})
    transfer: bool = field(
        default=True, metadata={"help": f"{', '.join(FROM_MNLI)} start from the best MNLI run, if mnli is in --tasks."}
    )
    max_seq_length: int = field(default=512, metadata={"help": "Length in tokens at which texts are truncated."})
    classifier_pooling: Literal["cls", "mean"] = field(
        default=None, metadata={"help": "What the classifier reads of a text. Default: as the model's config says."}
    )

    def __post_init__(self):
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"tasks: {', '.join(unknown)} is not one of {', '.join(TASKS)}")
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds} leaves no run; give 1 or more")
        check_leaves_tokens(self.max_seq_length)


@dataclass
class GlueTrainingArguments(PrecisionArguments, TrainingArguments):
    """Training arguments; the defaults are the paper's protocol, and the protocol sets strategies and schedule."""

    num_train_epochs: float = 10
    warmup_steps: float = 0.06  # share of all steps, as in the authors' code
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 64
    learning_rate: float = 1e-5
    weight_decay: float = 0.01
    logging_strategy: str = "no"
    report_to: str = "none"

    def __post_init__(self):
        for name in (*PROTOCOL, "save_steps", "lr_scheduler_kwargs", "resume_from_checkpoint"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name} is part of the paper's protocol; remove it, or use finetune_classifier.py")
        super().__post_init__()


def run_suite(arguments: GlueArguments, training: GlueTrainingArguments) -> dict:
    """Run all tasks, and write glue.json, the table glue.md and the figure glue.png.

    MNLI comes first, since other tasks start from its best run. The name of a run's folder is a hash of everything that decides
    its result, so a run whose result is there is not made again. Only the best run of each task keeps its weights.

    Args:
        arguments: Tasks, data and search.
        training: Training arguments; a preset or the grid sets batch size, learning rate and weight decay.

    Returns:
        Name of the model, its average over the tasks of the paper (None if one is missing), and for each task the start, the
        best setting, the scores of the seeds, their mean and standard deviation, and the metrics of the best run.

    Raises:
        ValueError: A file is damaged, an argument has no effect, or the model has no classifier.
        FloatingPointError: A run without a search has diverged, or all runs of a search.
        OSError: A file is missing.
    """
    if arguments.transfer and "mnli" not in arguments.tasks and (missing := set(arguments.tasks) & set(FROM_MNLI)):
        start = f"from {arguments.model_name_or_path}, not from the best run of mnli"
        print(f"{', '.join(sorted(missing))}: start {start}; add mnli to --tasks for the paper's protocol", flush=True)
    settings = {name: _settings(arguments, name, training) for name in arguments.tasks}  # errors come before any run
    tasks, starts = [], {}
    for name in sorted(arguments.tasks, key=lambda name: name != "mnli"):
        start = starts.get(name, arguments.model_name_or_path)
        tasks.append(_run_task(TASKS[name], start, settings[name], arguments, training))
        if name == "mnli" and arguments.transfer:
            starts = dict.fromkeys(FROM_MNLI, tasks[-1]["model"])
        means = {task["task"]: task["mean"] for task in tasks}
        summary = {"model": arguments.model_name_or_path, "average": average(means), "tasks": tasks}
        write_json(Path(training.output_dir, "glue.json"), summary)
        print(f"{name}: {tasks[-1]['mean']:.1f}", flush=True)
    Path(training.output_dir, "glue.md").write_text(glue_table(summary) + "\n", "utf-8")
    plot_glue(summary).savefig(Path(training.output_dir, "glue.png"), dpi=150)
    return summary


def _run_task(
    task: GlueTask, start: str, settings: list[dict], arguments: GlueArguments, training: GlueTrainingArguments
) -> dict:
    """The best setting of a task with all seeds."""
    data = load_task(task, arguments.data_dir)
    rows = content_hash({split: rows.to_dict() for split, rows in data.items()})
    identity = [_model_hash(start), rows, arguments.max_seq_length, arguments.classifier_pooling]

    def result(setting: dict, seed: int) -> dict:
        run = copy.copy(training)
        vars(run).update(setting, seed=seed)
        decisive = {name: value for name, value in run.to_dict().items() if name not in OF_THE_MACHINE}
        decisive["batch_size"] = run.train_batch_size * run.world_size  # of all devices together
        run.output_dir = str(Path(training.output_dir, task.name, content_hash([*identity, decisive])[:16]))
        file = Path(run.output_dir, "result.json")
        if not file.is_file():
            metrics = fine_tune(task, data, start, run, arguments.max_seq_length, arguments.classifier_pooling)
            write_json(file, {"setting": setting, "seed": seed, "metrics": metrics})
        return {**json.loads(file.read_text("utf-8")), "folder": run.output_dir}

    best, _ = _keep_best(result(setting, training.seed) for setting in settings)
    setting = best["setting"]
    best, of_seeds = _keep_best(result(setting, training.seed + i) for i in range(arguments.seeds))
    if any(run["metrics"] is None for run in of_seeds):
        raise FloatingPointError(f"{task.name}: a prediction is not finite; lower the learning rate of {setting}")
    if not Path(best["folder"], "model").is_dir():  # an earlier command with more seeds kept those of another seed
        Path(best["folder"], "result.json").unlink()
        best = result(setting, best["seed"])
    scores = list(map(_score, of_seeds))
    return {
        "task": task.name,
        "start": start,
        "setting": setting,
        "scores": scores,
        "mean": statistics.mean(scores),
        "standard_deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        "metrics": best["metrics"],
        "model": str(Path(best["folder"], "model")),
    }


def _model_hash(start: str) -> str:
    """A hash of a model's files, or its revision on the Hub."""
    if not Path(start).is_dir():
        return f"{start}@{AutoConfig.from_pretrained(start)._commit_hash}"
    files = [file for file in Path(start).iterdir() if file.suffix in (".safetensors", ".bin", ".json", ".txt")]
    return content_hash({file.name: file_hash(file) for file in files})


def _settings(arguments: GlueArguments, name: str, training: GlueTrainingArguments) -> list[dict]:
    """Batch size, learning rate and weight decay of each run of the search."""
    given = {argument: getattr(training, argument) for argument in GRID}
    if not arguments.grid and name not in PRESETS.get(arguments.preset, ()):
        return [given]
    if given != {argument: type(training).__dataclass_fields__[argument].default for argument in GRID}:
        raise ValueError(
            f"--grid or --preset sets {', '.join(GRID)}; remove them, or give --preset none without --grid"
        )
    values = itertools.product(*GRID.values()) if arguments.grid else [PRESETS[arguments.preset][name]]
    return [dict(zip(GRID, setting)) for setting in values]


def _score(result: dict) -> float:
    return -math.inf if result["metrics"] is None else result["metrics"]["score"]


def _keep_best(results: Iterable[dict]) -> tuple[dict, list[dict]]:
    """The best result and all of them; the weights of a worse one are removed as soon as the better one is known."""
    best, every = None, []
    for result in results:
        every.append(result)
        best, worse = (result, best) if best is None or _score(result) > _score(best) else (best, result)
        if worse and worse["folder"] != best["folder"]:
            shutil.rmtree(Path(worse["folder"], "model"), ignore_errors=True)
    return best, every


def fine_tune(
    task: GlueTask,
    data: dict[str, Dataset],
    start: str,
    training: GlueTrainingArguments,
    max_seq_length: int = 512,
    classifier_pooling: str | None = None,
) -> dict[str, float] | None:
    """Fine-tune a model for one task, and save the best checkpoint in the folder `model` inside `output_dir`.

    The schedule is the authors': linear warmup, then linear decay to a tenth of the peak; the warmup begins at a tenth too,
    since this schedule of transformers does. The model is evaluated every `eval_steps`, without a value every
    min(500, batches / 10) steps; training ends after 15 evaluations without improvement. A classifier of another task is replaced
    by a new one, and the layer before it is kept.

    Returns:
        Metrics of the best checkpoint by name, and `score`, their mean, each over all validation splits; None if the model has
        diverged.
    """
    set_seed(training.seed)
    tokenizer = load_tokenizer(start)

    def tokenize(rows):
        return tokenizer(*(rows[column] for column in task.texts), truncation=True, max_length=max_seq_length)

    tokens = {split: rows.map(tokenize, batched=True, remove_columns=list(task.texts)) for split, rows in data.items()}
    validation = [tokens[split] for split in task.validation]
    ends = list(itertools.accumulate(map(len, validation)))

    def metrics(predictions):
        parts = zip(np.split(predictions.predictions, ends[:-1]), np.split(predictions.label_ids, ends[:-1]))
        of_splits = [task_metrics(task, *part) for part in parts]
        return {name: statistics.mean(values[name] for values in of_splits) for name in of_splits[0]}

    folder = Path(training.output_dir)
    _remove_checkpoints(folder)  # of an interrupted run
    trainer = Trainer(
        _classifier(task, start, max_seq_length, classifier_pooling),
        _with_protocol(training, len(tokens["train"])),
        train_dataset=tokens["train"],
        eval_dataset=concatenate_datasets(validation),
        processing_class=tokenizer,
        compute_metrics=metrics,
        callbacks=[EarlyStoppingCallback(PATIENCE)],
    )
    try:
        trainer.train()
        result = trainer.evaluate()
        trainer.save_model(str(folder / "model"))
        return {name: result[f"eval_{name}"] for name in (*task.metrics, "score")}
    except FloatingPointError:
        return None
    finally:
        _remove_checkpoints(folder)


def _remove_checkpoints(folder: Path) -> None:
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def _classifier(
    task: GlueTask, start: str, max_seq_length: int, classifier_pooling: str | None
) -> AutoModelForSequenceClassification:
    names = dict(enumerate(task.classes or ["score"]))
    pooling = {"classifier_pooling": classifier_pooling} if classifier_pooling else {}
    model = AutoModelForSequenceClassification.from_pretrained(
        start,
        id2label=names,
        label2id={name: i for i, name in names.items()},
        # of this task, and not of the task that the start was fine-tuned for
        problem_type="regression" if task.classes is None else "single_label_classification",
        ignore_mismatched_sizes=True,
        dtype=torch.float32,
        **pooling,
    )
    check_max_length(model, max_seq_length)
    return model


def _with_protocol(training: GlueTrainingArguments, num_rows: int) -> GlueTrainingArguments:
    """A copy with the evaluations and the schedule of the paper, which depend on the number of steps."""
    batches = math.ceil(num_rows / training.train_batch_size)
    updates = math.ceil(batches / training.gradient_accumulation_steps)
    steps = training.max_steps if training.max_steps > 0 else math.ceil(updates * training.num_train_epochs)
    interval = training.eval_steps or max(1, min(500, batches // 10))
    # transformers 4 has shares in warmup_ratio
    share = training.warmup_steps or getattr(training, "warmup_ratio", 0) or 0
    warmup = math.ceil(share * steps) if share < 1 else int(share)
    training = copy.copy(training)
    vars(training).update(
        PROTOCOL,
        warmup_steps=warmup,
        eval_steps=interval,
        save_steps=interval,
        lr_scheduler_kwargs={"num_decay_steps": steps - warmup, "decay_type": "linear", "min_lr_ratio": 0.1},
    )
    return training
