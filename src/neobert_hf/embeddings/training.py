"""A training of an embedding model or a reranker in its folder: identity, exact resume, evaluation, record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.base.trainer import BaseTrainer
from sentence_transformers.sentence_transformer.modules import WordWeights

from neobert_cli.parser import option

from ..checkpoints import MINI_MODEL_PATH
from ..checkpoints.record import write_record
from ..data.lengths import as_list, check_leaves_tokens
from ..files.messages import say
from ..files.output import content_hash, file_hash, saving
from ..runs import CheckedCheckpoints
from ..runs.progress import without_bars
from ..runs.resume import curve_of, lock_run, train_or_resume
from .pairs import MOST_HELD_OUT, hold_out, read_sets_of_pairs

# Values of a run that its card shows.
SHOWN = (
    *("batch_size", "learning_rate", "warmup_steps", "bf16", "seed", "max_seq_length", "temperature"),
    *("num_negatives", "num_candidates", "context_size", "batches"),
)


@dataclass
class PairArguments:
    """Model and data of a training on pairs."""

    model_name_or_path: str = option("Model to train: folder or id on the Hub.", MINI_MODEL_PATH)
    train_files: list[str] | None = option(
        "Files of pairs: question and answer in the first two columns. Embeddings learn from negatives in others too."
    )
    validation_files: list[str] | None = option("Pairs to evaluate on. Default: rows of train_files.")
    held_out_share: float = option(
        f"Share of each of train_files to evaluate on, without validation_files; at most {MOST_HELD_OUT:,} rows.", 0.1
    )
    max_seq_length: int = option("Longest input in tokens. Default: the model's, at most 512.")

    def __post_init__(self):
        if not 0 <= self.held_out_share < 1:
            given = f"held_out_share={self.held_out_share}"
            raise ValueError(f"{given} is not a share; give 0 for no evaluation, or a number below 1")
        check_leaves_tokens(self.max_seq_length)
        self.train_files = as_list(self.train_files) or None
        self.validation_files = as_list(self.validation_files) or None


class PairTrainer(CheckedCheckpoints):
    """A trainer of sentence-transformers with a manifest in each checkpoint, which holds no trained weights of words.

    `WordWeights` is opened from its settings, so a run that trained its weights would resume with those of the start.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.model.modules():
            if isinstance(module, WordWeights):
                module.requires_grad_(False)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save without the card of sentence-transformers, which shows texts of the training data."""
        if self.args.should_save:  # transformers 5.23 calls this in every process
            self.model.save_pretrained(output_dir or self.args.output_dir, create_model_card=False)


def open_sets(arguments: PairArguments, seed: int) -> tuple[DatasetDict, DatasetDict]:
    """Return the sets to train on, and the sets to evaluate on: the validation files, or rows of the train files.

    Raises:
        ValueError: No file is named, two files have the same name, or a file is invalid.
    """
    if not arguments.train_files:
        raise ValueError("there are no data; give train_files")
    sets = read_sets_of_pairs(arguments.train_files)
    if arguments.validation_files:
        return sets, read_sets_of_pairs(arguments.validation_files)
    return hold_out(sets, arguments.held_out_share, seed)


def train_and_record(
    trainer_class: type[BaseTrainer],
    model: torch.nn.Module,
    training: Any,
    sets: Mapping[str, Dataset],
    loss: torch.nn.Module,
    evaluators: Sequence[BaseEvaluator],
    arguments: Any,
    files: Sequence[str | Path | None] = (),
    rows: Mapping[str, int] | None = None,
    **facts,
) -> list[dict]:
    """Evaluate the model, train or resume, save it, evaluate it again, and write the record of the training.

    Args:
        trainer_class: A trainer of sentence-transformers with `CheckedCheckpoints`.
        model: The model, which is trained.
        training: Training arguments, with `ResumeArguments`.
        sets: Rows by name.
        loss: Loss of the model.
        evaluators: Evaluators of the model before and after the training.
        arguments: A dataclass, whose values identify the run; `train_files` are data.
        files: Further files of data and folders of models that identify the run by their content.
        rows: Rows by name of the set, if wrong answers were added as rows of their own.
        facts: `datasets` and `remark` of the record.

    Returns:
        The scores of the record: for each evaluator the metrics after the training, and those `before` it; none in all processes
        but the first.

    Raises:
        FileExistsError: The folder holds another model, or checkpoints of another run.
        ValueError: A checkpoint is damaged or belongs to another run, or another training writes to the folder.
    """
    folder = Path(training.output_dir)
    run = _identity(model, training, sets, arguments, files)
    before: list[dict] = []

    def make_trainer(checkpoint: Path | None) -> BaseTrainer:
        """The model still has the weights of the start: Trainer loads those of the checkpoint later."""
        trainer = trainer_class(model, training, train_dataset=sets, loss=loss, evaluator=list(evaluators) or None)
        before.extend(_evaluate(trainer, evaluators))
        return trainer

    with lock_run(folder):
        trainer = train_or_resume(make_trainer, training, run)
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # computes in float32, as when it is opened
        with saving(folder), without_bars():
            trainer.save_model()
        if not trainer.is_world_process_zero():
            return []
        scores = []
        for evaluator, old, new in zip(evaluators, before, _evaluate(trainer, evaluators)):
            name = evaluator.primary_metric.removeprefix(f"{evaluator.name}_")
            say(f"{evaluator.name} {name}: {old[name]:.4f} before the training, {new[name]:.4f} after it")
            metrics = {name: value for name, value in new.items() if not name.startswith("base_")}
            scores.append({"dataset": evaluator.name, "split": "validation", "metrics": metrics, "before": old})
        figures = {**run, **asdict(arguments), "max_seq_length": model.max_seq_length}
        settings = {name: figures[name] for name in SHOWN if name in figures}
        settings = {"steps": trainer.state.global_step} | settings
        names = {Path(file).stem: Path(file).name for file in arguments.train_files or ()}
        rows = {names.get(name, name): number for name, number in (rows or run["num_rows"]).items()}
        source = model[0].model.name_or_path
        write_record(folder, training, source=source, rows=rows, scores=scores, settings=settings, **facts)
    return scores


def _identity(model, training, sets, arguments, files):
    """What decides the weights of a training, in plain types; a resume compares it."""
    values = asdict(arguments) | {"max_seq_length": model.max_seq_length}
    for name in ("validation_files", "clusters_dir"):
        values.pop(name, None)
    inputs = _input_files([*(arguments.train_files or ()), *files, model[0].model.name_or_path])
    run = {
        "arguments": values,
        "sha256": {str(file): file_hash(file) for file in inputs},
        "model": content_hash(str(model)),  # its modules, such as the pooling
        "prompts": getattr(training, "prompts", None),
        "num_rows": {name: len(part) for name, part in sets.items()},
        "batch_size": training.train_batch_size * training.gradient_accumulation_steps * training.world_size,
        **curve_of(training),
    }
    if not arguments.train_files:  # sets made in Python; hashes of the files identify others
        run["texts"] = {name: content_hash(part.to_dict()) for name, part in sets.items()}
    return run


def _evaluate(trainer: BaseTrainer, evaluators: Sequence[BaseEvaluator]) -> list[dict[str, float]]:
    """Metrics of each evaluator by name, without its own name; none in all processes but the first."""
    return [
        {name.removeprefix(f"{evaluator.name}_"): float(value) for name, value in evaluator(trainer.model).items()}
        for evaluator in (evaluators if trainer.is_world_process_zero() else ())
    ]


def _input_files(paths: Sequence[str | Path | None]) -> list[Path]:
    """The files of a run: data, and weights and tokenizer of folders of models; none for ids on the Hub.

    A folder whose model was trained again is another start. Its config does not count: it names the version of transformers.
    """
    found = []
    for path in [Path(path) for path in paths if path]:
        found += [path] if path.is_file() else sorted([*path.glob("model*.safetensors"), *path.glob("tokenizer.json")])
    return found
