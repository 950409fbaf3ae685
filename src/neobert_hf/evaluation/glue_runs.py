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

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
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

from ..data.files import content_hash, file_hash, write_json
from ..data.origins import load_tokenizer
from ..data.texts import check_max_length
from ..runs.arguments import PrecisionArguments
from .glue import AVERAGED, FROM_MNLI, GRID, PRESETS, TASKS, DivergedError, GlueTask, average, load_task, task_metrics

SUMMARY, RESULT, MODEL = "glue.json", "result.json", "model"  # of a suite; of a run
PATIENCE = 15  # evaluations without improvement (appendix C)
# A short evaluation of a small model on a CPU.
SHORT_TASKS, SHORT_RUN = ("sst2", "cola", "stsb"), {"max_steps": 400, "eval_steps": 200}
# Arguments that determine a result, beside the setting and the seed; a result of other arguments is not reused.
PROTOCOL = ("num_train_epochs", "max_steps", "eval_steps", "warmup_steps", "gradient_accumulation_steps")
PROTOCOL += ("bf16", "fp16", "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "data_seed")
PROTOCOL += (
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "optim_args",
    "optim_target_modules",
    "dataloader_drop_last",
)
PROTOCOL += ("warmup_ratio", "train_sampling_strategy", "group_by_length", "bf16_full_eval", "fp16_full_eval", "tf32")
# Arguments that the protocol sets in each run: constants, and names of those that depend on the number of steps.
SET_BY_PROTOCOL = {
    "eval_strategy": IntervalStrategy.STEPS,
    "save_strategy": SaveStrategy.STEPS,
    "save_total_limit": 1,
    "save_only_model": True,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_score",
    "greater_is_better": True,
    "lr_scheduler_type": SchedulerType.WARMUP_STABLE_DECAY,
}
SET_BY_STEPS = ("save_steps", "lr_scheduler_kwargs")


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
    seeds: int = field(default=1, metadata={"help": "Number of seeds of the setting."})
    transfer: bool = field(
        default=True, metadata={"help": f"{', '.join(FROM_MNLI)} start from the best MNLI run, if mnli is in --tasks."}
    )
    max_seq_length: int = field(default=512, metadata={"help": "Length in tokens at which texts are truncated."})

    def __post_init__(self):
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"tasks: {', '.join(unknown)} is not one of {', '.join(TASKS)}")
        if self.preset not in (*PRESETS, "none"):
            raise ValueError(f"preset={self.preset!r} is not one of {', '.join(PRESETS)}, none")


@dataclass
class GlueTrainingArguments(PrecisionArguments, TrainingArguments):
    """Training arguments; the defaults are the paper's protocol."""

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
        ValueError: A file is damaged, the output folder has results of other arguments, an argument has no effect, or the model
            has no classifier.
        OSError: A file is missing.
    """
    _check_effect(arguments, training)
    if arguments.transfer and "mnli" not in arguments.tasks and (missing := set(arguments.tasks) & set(FROM_MNLI)):
        start = f"from {arguments.model_name_or_path}, not from the best run of mnli"
        print(f"{', '.join(sorted(missing))}: start {start}; add mnli to --tasks for the paper's protocol", flush=True)
    tasks, best_mnli = [], None
    for name in sorted(arguments.tasks, key=lambda each: each != "mnli"):
        task, data = TASKS[name], load_task(TASKS[name], arguments.data_dir)
        start = best_mnli if best_mnli and name in FROM_MNLI else arguments.model_name_or_path
        runs = _Runs(arguments, training, task, data, start)
        settings = _settings(arguments, name, training)
        best, _ = _keep_best(runs.result(setting, training.seed, may_diverge=len(settings) > 1) for setting in settings)
        if best["metrics"] is None:
            raise ValueError(f"{name}: every run of the search failed: {best['error']}")
        setting = best["setting"]
        best, of_setting = _keep_best(runs.result(setting, training.seed + i) for i in range(arguments.seeds))
        # An earlier command with more seeds may have kept the weights of another one.
        if not Path(best["folder"], MODEL).is_dir():
            Path(best["folder"], RESULT).unlink()
            best = runs.result(setting, best["seed"])
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
        print(f"{name}: {tasks[-1]['mean']:.1f}", flush=True)
    return summary


def _default(training: GlueTrainingArguments) -> GlueTrainingArguments:
    return GlueTrainingArguments(output_dir=training.output_dir, use_cpu=training.use_cpu)


def _check_effect(arguments: GlueArguments, training: GlueTrainingArguments) -> None:
    """Raise ValueError if an argument was given that every run would replace or ignore."""
    default = _default(training)
    searched = GRID if arguments.grid or set(PRESETS.get(arguments.preset, ())) & set(arguments.tasks) else ()
    for name in (*searched, *SET_BY_PROTOCOL, *SET_BY_STEPS, "resume_from_checkpoint"):
        value = getattr(training, name)
        if value == getattr(default, name):
            continue
        if name in searched:
            search = "--grid" if arguments.grid else f"--preset {arguments.preset}"
            reason = f"{search} sets it; remove it, or give --preset none without --grid"
        elif name == "resume_from_checkpoint":
            reason = "the same command again makes the runs that are missing; remove it"
        else:
            reason = "the paper's protocol sets it; remove it, or fine-tune with finetune_classifier.py"
        raise ValueError(f"{name}={getattr(value, 'value', value)} has no effect, since {reason}")


def _exact(value: float) -> str:
    """A number in as few characters as `:g`, unless these are another number."""
    short = f"{value:g}"
    return short if float(short) == value else str(value)


def _score(result: dict) -> float:
    return -math.inf if result["metrics"] is None else result["metrics"]["score"]


def _keep_best(results: Iterable[dict]) -> tuple[dict, list[dict]]:
    """The best result and all of them; the weights of every other one are removed as soon as a better one is known."""
    best, every = None, []
    for result in results:
        every.append(result)
        best, loser = (result, best) if best is None or _score(result) > _score(best) else (best, result)
        if loser and loser["folder"] != best["folder"]:
            shutil.rmtree(Path(loser["folder"], MODEL), ignore_errors=True)
    return best, every


def _settings(arguments: GlueArguments, name: str, training: GlueTrainingArguments) -> list[dict]:
    """Batch size, learning rate and weight decay of each run of the search."""
    if arguments.grid:
        return [dict(zip(GRID, values)) for values in itertools.product(*GRID.values())]
    if name in PRESETS.get(arguments.preset, ()):
        return [dict(zip(GRID, PRESETS[arguments.preset][name]))]
    return [{each: getattr(training, each) for each in GRID}]


def _identity(start: str, data: dict[str, Dataset]) -> dict[str, str]:
    """A hash of a model's files, or its revision on the Hub, and a hash of the rows."""
    if Path(start).is_dir():
        files = [file for file in Path(start).iterdir() if file.suffix in (".safetensors", ".bin", ".json", ".txt")]
        model = content_hash({file.name: file_hash(file) for file in files})
    else:
        model = f"{start}@{AutoConfig.from_pretrained(start)._commit_hash}"
    return {"model": model, "rows": content_hash({split: rows.to_dict() for split, rows in data.items()})}


class _Runs:
    """The runs of a task from one start; a run whose result is in its folder is not made again."""

    def __init__(self, arguments: GlueArguments, training: GlueTrainingArguments, task, data, start: str):
        self.arguments, self.training, self.task, self.data, self.start = arguments, training, task, data, start
        self.identity = {"max_seq_length": arguments.max_seq_length, **_identity(start, data)}

    def result(self, setting: dict, seed: int, may_diverge: bool = False) -> dict:
        """Return the result of a run; a run that diverges has no metrics if `may_diverge`, and is an error otherwise."""
        training = copy.copy(self.training)
        vars(training).update(setting, seed=seed)
        folder = Path(training.output_dir, self.task.name, "-".join(map(_exact, (*setting.values(), seed))))
        run = {**self.identity, **{name: value for name, value in training.to_dict().items() if name in PROTOCOL}}
        try:
            result = json.loads(Path(folder, RESULT).read_text("utf-8"))
        except FileNotFoundError:
            result = {"run": run, "setting": setting, "seed": seed}
            try:
                length = self.arguments.max_seq_length
                result["metrics"] = fine_tune(self.task, self.data, self.start, folder, training, length)
            except DivergedError as error:
                if not may_diverge:
                    raise
                result |= {"metrics": None, "error": str(error)}
            write_json(Path(folder, RESULT), result)
        # arguments that a result of an earlier version lacks had the default
        there = {**_default(self.training).to_dict(), **result["run"]}
        if different := sorted(name for name in run if there.get(name) != run[name]):
            raise ValueError(
                f"{folder} has the result of a run with {different[0]}={there.get(different[0])!r}, not "
                f"{run[different[0]]!r}; choose another --output_dir, or remove that folder"
            )
        return {**result, "folder": str(folder)}


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
    tokenizer = load_tokenizer(start)

    def tokenize(rows):
        return tokenizer(*(rows[column] for column in task.texts), truncation=True, max_length=max_seq_length)

    tokens = {split: rows.map(tokenize, batched=True, remove_columns=list(task.texts)) for split, rows in data.items()}
    names = dict(enumerate(task.classes or ["score"]))
    options = {"id2label": names, "label2id": {name: i for i, name in names.items()}, "dtype": torch.float32}
    # of this task, and not of the task that the start was fine-tuned for
    options["problem_type"] = "regression" if task.classes is None else "single_label_classification"
    model = AutoModelForSequenceClassification.from_pretrained(start, **options, ignore_mismatched_sizes=True)
    check_max_length(model, max_seq_length)

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
    # transformers 4 has shares in warmup_ratio
    share = training.warmup_steps or getattr(training, "warmup_ratio", 0) or 0
    warmup = math.ceil(share * steps) if share < 1 else int(share)
    vars(training).update(
        warmup_steps=warmup,
        output_dir=str(folder),
        **SET_BY_PROTOCOL,
        eval_steps=interval,
        save_steps=interval,
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
