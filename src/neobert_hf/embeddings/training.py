"""A training run of an embedding model or a reranker in its folder: identity, exact resume, evaluation and summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.base.trainer import BaseTrainer
from sentence_transformers.base.training_args import BaseTrainingArguments

from ..files.writing import file_hash, saving, write_json
from ..runs.card_files import keeping_card
from ..runs.cards import training_facts, write_card
from ..runs.folders import SUMMARY, train_or_resume
from ..runs.manifests import CHECKPOINTS_INTACT
from .training_sets import ids_on_hub

# Arguments that determine the loss curve; a resumed run must have the same values.
CURVE = ("max_steps", "learning_rate", "learning_rate_mapping", "lr_scheduler_type", "lr_scheduler_kwargs")
CURVE += (
    "warmup_steps",
    "warmup_ratio",
    "optim",
    "optim_args",
    "weight_decay",
    "max_grad_norm",
    "per_device_train_batch_size",
)
CURVE += ("gradient_accumulation_steps", "batch_sampler", "bf16", "fp16", "seed")


def train_and_summarize(
    make_trainer: Callable[[Path | None], BaseTrainer],
    training: BaseTrainingArguments,
    arguments: Mapping,
    files: Sequence[str],
    num_rows: Mapping[str, int],
    evaluators: Sequence[BaseEvaluator],
    shown: Sequence[str],
) -> dict:
    """Evaluate the model, train or resume, save it, evaluate it again, and write `training_summary.json` and the card.

    Args:
        make_trainer: As for `train_or_resume`.
        training: Training arguments.
        arguments: Values that identify the run besides the training arguments.
        files: Files whose content identifies the run: data, and `start_files`.
        num_rows: Rows of each file or training set, without wrong answers that were added as rows of their own.
        evaluators: Evaluators of the model before and after the training; both results go into the summary.
        shown: Names in `arguments` that go into the summary.

    Returns:
        The summary; empty in all processes but the first.

    Raises:
        FileExistsError: The folder holds checkpoints of another run.
        ValueError: A checkpoint is damaged or belongs to another run.
    """
    run = {
        "arguments": dict(arguments),
        "sha256": {file: file_hash(Path(file)) for file in files},
        "num_rows": dict(num_rows),
        "batch_size": training.train_batch_size * training.gradient_accumulation_steps * training.world_size,
        **{name: value for name, value in training.to_dict().items() if name in CURVE},
    }
    before = {}

    def make_and_evaluate(checkpoint: Path | None) -> BaseTrainer:
        """The model still has the weights of the start: Trainer loads those of the checkpoint later."""
        trainer = make_trainer(checkpoint)
        before.update(_evaluate(trainer, evaluators))
        return trainer

    trainer = train_or_resume(make_and_evaluate, training, run)
    with saving(Path(training.output_dir), CHECKPOINTS_INTACT), keeping_card(training.output_dir):
        trainer.save_model()
    if not trainer.is_world_process_zero():
        return {}
    summary = {
        "steps": trainer.state.global_step,
        **{name: run[name] for name in ("batch_size", "learning_rate", "seed")},
        "num_rows": sum(map(len, trainer.train_dataset.values())),
        **{name: arguments[name] for name in shown},
        "before": before,
        "after": _evaluate(trainer, evaluators),
    }
    write_json(Path(training.output_dir, SUMMARY), summary, CHECKPOINTS_INTACT)
    names = {Path(file).stem: Path(file).name for file in arguments.get("train_files") or ()}
    num_wrong = summary["num_rows"] - sum(num_rows.values())
    facts = training_facts(
        training,
        arguments["model_name_or_path"],
        rows={names.get(name, name): number for name, number in num_rows.items()},
        remark=f"An embedding model found {num_wrong:,} wrong answers to the questions." if num_wrong else "",
        datasets=ids_on_hub(arguments, num_rows),
    )
    write_card(training.output_dir, facts, trainer.accelerator.unwrap_model(trainer.model))
    for name in (evaluator.primary_metric for evaluator in evaluators):
        print(f"{name}: {before[name]:.4f} before the training, {summary['after'][name]:.4f} after it")
    print(json.dumps(summary))
    return summary


def _evaluate(trainer: BaseTrainer, evaluators: Sequence[BaseEvaluator]) -> dict[str, float]:
    """Metrics by name; none in all processes but the first."""
    used = evaluators if trainer.is_world_process_zero() else ()
    return {name: float(value) for evaluator in used for name, value in evaluator(trainer.model).items()}


def start_files(folder: str) -> list[str]:
    """Return the files that identify the model or tokenizer from which a run starts; none if it is not a folder.

    A folder whose model was trained again is another start. Its config does not count: it names the version of transformers.
    """
    return sorted(str(file) for name in ("model*.safetensors", "tokenizer.json") for file in Path(folder).glob(name))
