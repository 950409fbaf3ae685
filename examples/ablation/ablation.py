"""Ablations: arms that differ in a few values, trained on the same rows, and compared on the same masks of held-out documents."""

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
import yaml
from held_out import held_out_losses
from scipy import stats

from neobert_hf.checkpoints import load_tokenizer
from neobert_hf.data import tokenizer_hash
from neobert_hf.files import check_folder, content_hash, only_writer, printable, read_json, write_json
from neobert_hf.pretraining import (
    Corpus,
    CorpusArguments,
    PretrainingArguments,
    build_model,
    open_text,
    order_of_rows,
    pretrain,
)
from neobert_hf.runs import CommandParser

PLAN, REPORT, RESULT, LOCK = "plan.json", "ablation.json", "held_out.json", ".ablation.lock"
SUMMARY = "training_summary.json"  # that `pretrain` writes
FUNCTIONS = ("model", "optimizer", "schedule")  # of `pretrain`
CONFIDENCE = 0.95
# Values of a recipe that decide neither which documents lie in which row of which step, nor which tokens are masked.
OF_WEIGHTS = (
    *("optimizer", "learning_rate", "schedule", "warmup_steps", "decay_until", "decay_from", "weight_decay"),
    *("decay_norms_and_embeddings", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "batch_format"),
    *("architecture", "config", "corpus", "text_column", "tokenizer"),
)
OF_MASKS = ("max_steps", "mask_rate", "mask_rate_shares", "mask_replace_prob", "random_replace_prob")
# What a launcher sets for one training on several devices; here each process trains runs of its own.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
DEFAULTS = {"report_to": "none", "save_total_limit": 1}


class ArmParser(CommandParser):
    """The command line of pretraining, whose errors are ValueError."""

    def error(self, message: str) -> None:
        """Raise the error."""
        raise ValueError(message)


@dataclass(frozen=True)
class Ablation:
    """Which runs an ablation has.

    Args:
        arms: Arguments of pretraining by the name of an arm; the first arm is the baseline.
        seeds: Every arm is trained once with each seed.
        common: Arguments of all arms; an arm may give another value.
        functions: `optimizer`, `schedule` and `model` of `pretrain` by the name of an arm.

    Raises:
        ValueError: A name or a value is wrong, or arms differ in the held-out files.
    """

    arms: dict[str, dict[str, Any]]
    seeds: tuple[int, ...] = (1, 2)
    common: dict[str, Any] | None = None
    functions: dict[str, dict[str, Any]] | None = None

    def __post_init__(self):
        if len(self.arms) < 2 or not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"arms {', '.join(self.arms)} and seeds {self.seeds}: give two arms or more, and different seeds"
            )
        if bad := [name for name in self.arms if not name.replace("-", "").replace("_", "").isalnum()]:
            raise ValueError(f"arm {bad[0]!r} names a folder: use letters, digits, - and _")
        if unknown := (self.functions or {}).keys() - self.arms.keys():
            raise ValueError(f"functions of {', '.join(unknown)}, which is no arm; the arms are {', '.join(self.arms)}")
        for arm, functions in (self.functions or {}).items():
            if unknown := functions.keys() - set(FUNCTIONS):
                raise ValueError(f"functions of {arm}: {', '.join(unknown)} is not one of {', '.join(FUNCTIONS)}")

    @property
    def baseline(self) -> str:
        """Name of the arm that the others are compared with."""
        return next(iter(self.arms))

    def arguments(self, arm: str, seed: int, output_dir: Path) -> tuple[CorpusArguments, PretrainingArguments]:
        """Return the arguments of a run, in the folder ARM-SEED of `output_dir`."""
        folder = output_dir / f"{arm}-{seed}"
        values = {**DEFAULTS, **(self.common or {}), **(self.arms[arm] or {}), "output_dir": folder, "seed": seed}
        names = [item.name for kind in (CorpusArguments, PretrainingArguments) for item in fields(kind)]
        if fixed := {"seed", "output_dir"} & {*(self.common or {}), *(self.arms[arm] or {})}:
            raise ValueError(f"arm {arm}: {', '.join(sorted(fixed))} has no effect; the ablation sets it for each run")
        if unknown := [name for name in values if name not in names]:
            close = "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(unknown[0], names, n=1))
            raise ValueError(f"arm {arm}: {unknown[0]} is no argument of pretraining{close}")
        words = []
        for name, value in values.items():
            words += [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]
        try:
            return ArmParser((CorpusArguments, PretrainingArguments)).parse_args_into_dataclasses(words)
        except ValueError as error:
            raise ValueError(f"arm {arm}: {error}") from error


def read_ablation(file: str | Path) -> Ablation:
    """Read an ablation from a YAML file with the keys `arms`, `seeds` and `common`.

    Raises:
        ValueError: The file is no such YAML.
        OSError: The file cannot be read.
    """
    try:
        values = yaml.safe_load(Path(file).read_text("utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict) or not {"arms"} <= values.keys() <= {"arms", "seeds", "common"}:
        found = ", ".join(map(str, values)) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{file} holds {found}; it must hold arms, and may hold seeds and common")
    arms, common, seeds = values["arms"], values.get("common"), values.get("seeds", list(Ablation.seeds))
    parts = [common, *arms.values()] if isinstance(arms, dict) else [arms]
    if (
        not isinstance(arms, dict)
        or not all(isinstance(part, dict | None) for part in parts)
        or not isinstance(seeds, list)
    ):
        raise ValueError(f"{file}: arms and common must hold arguments by name, and seeds a list of numbers")
    return Ablation({str(name): of_arm or {} for name, of_arm in arms.items()}, tuple(seeds), common)


def ablate(
    ablation: Ablation, output_dir: str | Path, stop_early: bool = False, per_character: bool = False
) -> dict[str, Any] | None:
    """Train the runs of an ablation, compare each arm with the first one, and write the result to `ablation.json`.

    A run is a pretraining in the folder ARM-SEED. A finished run stays, and an interrupted one resumes. Several processes, of
    `accelerate launch` or of machines that share the folder, divide the runs among them: each trains alone on its device.

    Args:
        ablation: The runs.
        output_dir: Folder of the runs and of the result.
        stop_early: Train no further seed of an arm when two or more seeds have settled the sign of its difference.
        per_character: Compare the loss per character, for arms with different tokenizers, and not per masked token.

    Returns:
        The content of `ablation.json`; None if other processes still train.

    Raises:
        ValueError: A value is wrong, arms cannot be compared, the folder belongs to another ablation, or the baseline diverged.
        OSError: A file cannot be read or written.
    """
    output_dir = Path(output_dir)
    _leave_launcher()
    runs = {(arm, seed): ablation.arguments(arm, seed, output_dir) for seed in ablation.seeds for arm in ablation.arms}
    arms = {arm: runs[arm, ablation.seeds[0]] for arm in ablation.arms}
    texts, max_length = _check_comparable(ablation, arms, per_character)
    check_folder(output_dir, PLAN, LOCK)
    with only_writer(output_dir, LOCK, wait=True):
        plan = _check_plan(output_dir, ablation, arms, per_character)
        for arm, (data, training) in arms.items():  # the first process tokenizes for all
            _tokenize(output_dir, data, training)
            for seed in ablation.seeds:
                runs[arm, seed][0].documents_dir = data.documents_dir
        write_json(output_dir / PLAN, plan)

    def missing(results):
        """The runs that the comparison still needs."""
        others = [arm for arm in ablation.arms if arm != ablation.baseline]
        if stop_early:
            others = [arm for arm in others if not _is_settled(results, arm, ablation, per_character)]
        needed = {ablation.baseline, *others} if others else ()
        return [run for run in runs if run[0] in needed and run not in results]

    for run, (data, training) in runs.items():
        if run in missing(_read_results(output_dir, ablation)):
            _train(run[0], data, training, (ablation.functions or {}).get(run[0], {}), texts, max_length)
        results = _read_results(output_dir, ablation)
        if run[0] == ablation.baseline and "diverged" in results.get(run, ()):
            raise ValueError(f"the baseline {run[0]} diverged: {results[run]['diverged']}; choose another first arm")
    if missing(results):
        print("other processes still train; the last one compares the arms", flush=True)
        return None
    report = {
        "baseline": ablation.baseline,
        "unit": "character" if per_character else "masked token",
        "confidence": CONFIDENCE,
        "arms": {arm: _describe(results, arm, ablation, arms, per_character) for arm in ablation.arms},
    }
    write_json(output_dir / REPORT, report)
    return report


def _leave_launcher():
    """Make this process one that trains alone, on the device that a launcher of several processes gives it."""
    place, visible = os.environ.get("LOCAL_RANK"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if place is not None and visible != "":  # an empty list hides all devices
        devices = visible.split(",") if visible else [str(number) for number in range(int(place) + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(place) % len(devices)]
    for name in LAUNCHER:
        os.environ.pop(name, None)


def _check_comparable(ablation, arms, per_character):
    """Return the held-out texts and the length at which they are cut, if all arms can be compared on them."""
    files = {arm: tuple(data.validation_files or ()) for arm, (data, _) in arms.items()}
    if len(set(files.values())) > 1 or not all(files.values()):
        raise ValueError("give all arms the same validation_files: the arms are compared on these documents")
    baseline, first = ablation.baseline, arms[ablation.baseline][1]
    for arm, (_, training) in arms.items():  # the first one sets accelerate's state of this process
        if (training.bf16, training.fp16) != (first.bf16, first.fp16):
            raise ValueError(
                f"the arms {baseline} and {arm} have different precision; give all arms the same bf16 and fp16"
            )
    tokenizers = {arm: _tokenizer_of(data, training) for arm, (data, training) in arms.items()}
    hashes = {arm: tokenizer_hash(tokenizer) for arm, tokenizer in tokenizers.items()}
    if (others := [arm for arm in arms if hashes[arm] != hashes[baseline]]) and not per_character:
        raise ValueError(
            f"the arms {baseline} and {others[0]} have different tokenizers, so their losses per token cannot be compared; "
            "compare them per character (--per_character)"
        )
    sizes = {}
    for arm, (_, training) in arms.items():
        variant = (ablation.functions or {}).get(arm, {}).get("model")
        if training.phase == 1:  # phase 2 loads its model
            with torch.device("meta"):
                model = build_model(training.to_recipe(), tokenizers[arm], training.config_overrides, variant)
            sizes[arm] = model.config.vocab_size
    if len(set(sizes.values())) > 1 and not per_character:
        raise ValueError(f"the arms have vocabularies of {sizes} tokens, so their losses per token cannot be compared")
    data, _ = arms[baseline]
    corpus = Corpus(data.validation_files, text_column=data.text_column or "text", sample_by=data.sample_by)
    texts = [text for text in corpus if text.strip()]
    return texts, min(training.max_length for _, training in arms.values())


def _tokenizer_of(data, training):
    return load_tokenizer(data.tokenizer_name or training.to_recipe().tokenizer)


def _check_plan(output_dir, ablation, arms, per_character):
    """Return what the ablation compares, or raise ValueError if the folder has another one; seeds may be added."""
    plan = {"arms": ablation.arms, "seeds": ablation.seeds, "common": ablation.common, "per_character": per_character}
    plan["recipes"] = {arm: asdict(training.to_recipe()) for arm, (_, training) in arms.items()}  # a file may change
    plan["functions"] = {
        arm: {name: _name_of(function) for name, function in functions.items()}
        for arm, functions in (ablation.functions or {}).items()
    }
    plan = json.loads(json.dumps(plan, default=str))
    file = output_dir / PLAN
    earlier = read_json(file) if file.exists() else plan
    has_more_seeds = plan["seeds"][: len(earlier["seeds"])] == earlier["seeds"]
    different = [name for name in plan if plan[name] != earlier.get(name) and not (name == "seeds" and has_more_seeds)]
    if different:
        details = "; ".join(f"{name} were {earlier.get(name)} and are {plan[name]}" for name in different)
        raise ValueError(f"{output_dir} holds another ablation: {details}; give another --output_dir")
    return plan


def _name_of(function: Callable) -> str:
    """The name of a function or class; of a `partial`, that of its function."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", type(inner).__qualname__)


def _text_of(data, training):
    """What identifies the tokenized text of a run."""
    names = ("train_files", "dataset_config", "text_column", "sample_by")
    text = {name: getattr(data, name) for name in names}
    text["tokenizer"] = tokenizer_hash(_tokenizer_of(data, training))
    if not data.train_files:
        text["dataset_name"] = data.dataset_name or training.to_recipe().corpus
    return text


def _tokenize(output_dir, data, training):
    """Tokenize the text of a run, if no run with the same text and tokenizer has done it, and set its folder."""
    text = content_hash(_text_of(data, training))
    data.documents_dir = data.documents_dir or str(output_dir / f"documents-{text[:8]}")
    open_text(data, training, _tokenizer_of(data, training))


def _train(arm, data, training, functions, texts, max_length):
    """Train a run and write its result, unless another process does."""
    folder = Path(training.output_dir)
    lock = filelock.FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return
    try:
        if (folder / RESULT).exists():  # another process has finished it meanwhile
            return
        try:
            trainer = pretrain(data, training, **functions)
            result = held_out_losses(trainer.model, trainer.processing_class, texts, max_length)
            if not np.isfinite(np.array(result["loss"])[np.array(result["num_masked"]) > 0]).all():
                raise FloatingPointError("the loss of a held-out document was not finite")
        except FloatingPointError as error:
            print(printable(f"the arm {arm} diverged with seed {training.seed}: {error}"), flush=True)
            result = {"diverged": str(error)}
        write_json(folder / RESULT, result)
    finally:
        lock.release()


def _read_results(output_dir, ablation):
    files = {(arm, seed): output_dir / f"{arm}-{seed}" / RESULT for seed in ablation.seeds for arm in ablation.arms}
    return {run: read_json(file) for run, file in files.items() if file.exists()}


def _losses(results, arm, ablation, per_character):
    """Losses of the documents by seed, (S, N), of the seeds with which the arm has finished."""
    finished = {seed: results[arm, seed] for seed in ablation.seeds if "loss" in results.get((arm, seed), ())}
    losses = {}
    for seed, result in finished.items():
        values = np.array(result["loss"], float)
        if per_character:
            values = values * np.array(result["num_tokens"]) / np.maximum(result["num_characters"], 1)
        losses[seed] = values
    return losses


def compare_losses(ours: Mapping[int, np.ndarray], theirs: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Compare two arms by the losses of the same documents, paired by document and by seed.

    Args:
        ours: Losses (N,) by seed; a document with NaN is left out.
        theirs: The same of the baseline.

    Returns:
        `difference`, the mean of ours - theirs; `interval`, its bootstrap interval over the documents, for these trained models;
        `by_seed`, the difference with each seed; `interval_of_seeds`, Student's interval of these, None with one seed; and
        `num_documents`.
    """
    seeds = [seed for seed in ours if seed in theirs]
    paired = np.stack([np.asarray(ours[seed]) - np.asarray(theirs[seed]) for seed in seeds])
    paired = paired[:, np.isfinite(paired).all(0)]
    options = {"confidence_level": CONFIDENCE, "method": "percentile", "random_state": 0, "batch": 500}
    interval = stats.bootstrap((paired.mean(0),), np.mean, **options).confidence_interval
    by_seed, of_seeds = paired.mean(1), None
    if len(seeds) > 1:
        spread = stats.t(len(seeds) - 1).ppf((1 + CONFIDENCE) / 2) * stats.sem(by_seed)
        of_seeds = [float(by_seed.mean() - spread), float(by_seed.mean() + spread)]
    return {
        "difference": float(by_seed.mean()),
        "interval": [float(interval.low), float(interval.high)],
        "interval_of_seeds": of_seeds,
        "by_seed": dict(zip(map(str, seeds), by_seed.tolist())),
        "num_documents": paired.shape[1],
    }


def _is_settled(results, arm, ablation, per_character):
    """Whether both intervals of a difference, over the documents and over two or more seeds, are without zero."""
    ours, theirs = (_losses(results, name, ablation, per_character) for name in (arm, ablation.baseline))
    if len(ours.keys() & theirs.keys()) < 2:
        return False
    found = compare_losses(ours, theirs)
    return all(low > 0 or high < 0 for low, high in (found["interval"], found["interval_of_seeds"]))


def _compare_rows(ours, theirs):
    """Whether two arms have the same rows in the steps that both have, and whether the same tokens of them are masked."""
    rows, masks, steps = [], [], min(training.max_steps for _, training in (ours, theirs))
    for data, training in (ours, theirs):
        recipe = training.to_recipe()
        values = {name: value for name, value in asdict(recipe).items() if name not in (*OF_WEIGHTS, *OF_MASKS)}
        values["longer_than"] = recipe.mixture[0] != 1 and recipe.longer_than
        text = _text_of(data, training) if data.streaming else data.documents_dir
        rows.append((values, text, order_of_rows(data, training)))
        rates = [recipe.mask_rate_at(step) for step in range(steps)]
        masks.append((rates, recipe.mask_replace_prob, recipe.random_replace_prob))
    same_rows = rows[0] == rows[1]
    return {"same_rows": same_rows, "same_masks": same_rows and masks[0] == masks[1]}


def _describe(results, arm, ablation, arms, per_character):
    """What `ablation.json` says of an arm."""
    losses, theirs = (_losses(results, name, ablation, per_character) for name in (arm, ablation.baseline))
    diverged = {
        str(seed): results[name, seed]["diverged"]
        for name, seed in results
        if name == arm and "diverged" in results[name, seed]
    }
    described = {**_compare_rows(arms[arm], arms[ablation.baseline]), "diverged": diverged}
    if not losses:
        return described
    of_seeds = [results[arm, seed] for seed in losses]
    summary = read_json(Path(arms[arm][1].output_dir).with_name(f"{arm}-{next(iter(losses))}") / SUMMARY)
    described |= {name: summary[name] for name in ("num_parameters", "num_tokens", "steps")}
    described |= {
        "loss": float(np.mean([np.nanmean(values) for values in losses.values()])),
        "loss_by_seed": {str(seed): float(np.nanmean(values)) for seed, values in losses.items()},
        "masked_accuracy": float(np.mean([sum(each["num_correct"]) / sum(each["num_masked"]) for each in of_seeds])),
    }
    if arm != ablation.baseline and losses.keys() & theirs.keys():
        described |= compare_losses(losses, theirs)
    return described
