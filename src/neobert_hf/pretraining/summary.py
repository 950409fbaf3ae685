"""Summary of a finished pretraining: its figures, its curves, and the record for the model card."""

import shlex
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

import numpy as np
from transformers import Trainer

from ..files.writing import write_json
from ..runs import environment, write_record
from ..runs.folders import SUMMARY
from ..runs.manifests import CHECKPOINTS_INTACT
from .arguments import VALUES, CorpusArguments, PretrainingArguments
from .flops import num_elements, training_flops
from .recipes import load_recipe

SCHEDULES = {  # on the card
    "paper": "{warmup_steps} steps of warmup, cosine to a tenth of the peak until step {decay_until}, then constant",
    "code": "{warmup_steps} steps of warmup, cosine of the authors' code until step {decay_until}, then a tenth of the peak",
    "linear": "{warmup_steps} steps of warmup, then linear to 0",
    "constant": "constant at a tenth of the peak",
    "wsd": "{warmup_steps} steps of warmup, constant until step {decay_from}, then 1 - sqrt to 0",
}
# Values of an optimizer on the card, under their names in torch.
TITLES = {
    "lr": "learning rate",
    "betas": "betas",
    "momentum": "momentum",
    "eps": "epsilon",
    "weight_decay": "weight decay",
}
# Arguments in the command on the card, beside those of the text and of the recipe.
REPEATED = (
    "recipe",
    "phase",
    "init_from",
    "config_overrides",
    "row_tokens",
    "per_device_train_batch_size",
    "seed",
    "bf16",
    "fp16",
    "optim",
    "optim_args",
    "dataloader_num_workers",
)
COUNTS = "pretraining"  # the sums of a run, in the state of a checkpoint
HELD_OUT_METRICS = ("eval_loss", "eval_perplexity", "eval_masked_accuracy")


def write_summary(trainer: Trainer, run: dict, held_out: dict, command: str) -> dict:
    """Write `training_summary.json`, `training_curves.png`, and `training.json` for the model card; return the summary."""
    machine = environment()
    folder, log = Path(trainer.args.output_dir), trainer.state.log_history
    last = [entry for entry in log if "masked_accuracy" in entry][-1]
    names = ("num_tokens", "num_masked", "loss", "perplexity", "masked_accuracy")
    speeds = [entry["tokens_per_s"] for entry in log if "tokens_per_s" in entry]
    shares = [entry["model_flops_utilization"] for entry in log if "model_flops_utilization" in entry]
    model, counts = trainer.accelerator.unwrap_model(trainer.model), trainer.state.stateful_callbacks[COUNTS]
    summary = {
        **run,
        "num_parameters": num_elements(model.parameters()),
        "training_flops": training_flops(
            model, *(counts[name] for name in ("num_tokens", "num_masked", "sum_of_squares"))
        ),
        "steps": trainer.state.global_step,
        **{name: last[name] for name in names},
        **held_out,
        "tokens_per_s": float(np.median(speeds)),
        "model_flops_utilization": float(np.median(shares)),
        "packing_efficiency": last["num_tokens"] / (trainer.state.global_step * trainer.args.tokens_per_step),
        "training_seconds": trainer.seconds,
        "devices": trainer.accelerator.num_processes,
        "precision": {"no": "fp32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision),
        "machine": {name: value for name, value in machine.items() if name != "versions"},
        "versions": machine["versions"] | {"neobert_hf": version("neobert_hf")},
        "command": command,
    }
    write_json(folder / SUMMARY, summary, CHECKPOINTS_INTACT)
    plot_curves(log, folder / "training_curves.png")
    _write_record(trainer.args, summary)
    return summary


def _write_record(training, summary):
    source = summary["data"].get("source", summary["data"])
    dataset = source.get("dataset_name")
    names = [file["name"] for file in source.get("files", ())] or [dataset]
    count = summary["data"].get("num_documents") if len(names) == 1 else None
    metrics = {name.removeprefix("eval_"): summary[name] for name in summary if name in HELD_OUT_METRICS}
    write_record(
        training.output_dir,
        training,
        source=training.init_from,
        rows=dict.fromkeys(names, count),
        datasets=[dataset] if dataset and not Path(dataset).is_dir() else [],
        scores=[{"dataset": "held-out documents", "split": "validation", "metrics": metrics}] if metrics else [],
        settings=settings_of(summary, Path(training.recipe).stem),
    )


def settings_of(summary: dict, recipe_name: str) -> dict[str, str | int | float]:
    """Return how a model was pretrained, as a card shows it, from the summary of the run alone."""
    recipe, machine = summary["recipe"], summary["machine"]
    lengths = f"up to {recipe['max_length']} tokens, in rows of {summary['row_tokens']}"
    if recipe["mixture"][0] != 1:
        shares = zip(recipe["mixture"], (0, *recipe["longer_than"]))
        lengths += ": " + ", ".join(f"{share:.0%} of the steps above {length}" for share, length in shares)
    schedule = SCHEDULES[recipe["schedule"]].format(**recipe)
    if "schedule" in summary:
        schedule = f"function {summary['schedule']['function']}"
    masks = ", then ".join(f"{rate:g}" for rate in recipe["mask_rate"])
    if recipe["mask_replace_prob"] != 1:
        masks += (
            f"; {recipe['mask_replace_prob']:.0%} of them [MASK], {recipe['random_replace_prob']:.0%} random tokens"
        )
    device = machine["gpu"] or f"{machine['processor']} ({machine['instructions']})"
    return {
        "recipe": f"{recipe_name}, phase {summary['phase']}",
        "optimizer": _optimizer_of(summary),
        # an optimizer that was given has its own
        **({} if "optimizer" in summary else {"peak learning rate": recipe["learning_rate"]}),
        "schedule": schedule,
        "gradient clipping": recipe["max_grad_norm"],
        "steps": summary["steps"],
        "tokens": summary["num_tokens"],
        "tokens a step": recipe["tokens_per_step"],
        "predicted tokens": summary["num_masked"],
        "lengths": lengths,
        "rows": recipe["batch_format"],
        "mask rate": masks,
        "precision": summary["precision"],
        "seed": summary["seed"],
        "versions": ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        "machine": f"{summary['devices']} x {device}" if summary["devices"] > 1 else device,
        "time": f"{summary['training_seconds']:.0f} s",
        "command": summary["command"],
    }


def _optimizer_of(summary):
    """The optimizer with its values: that of a function or of Muon as it was made, else AdamW by the recipe."""
    recipe = summary["recipe"]
    if "optimizer" not in summary and not summary["optim"].startswith("adamw"):
        return f"{summary['optim']}, {summary['optim_args'] or 'its defaults'}, weight decay {recipe['weight_decay']:g}"
    if "optimizer" not in summary:
        decayed = "all parameters" if recipe["decay_norms_and_embeddings"] else "matrices"
        return (
            f"{summary['optim']}: betas {recipe['adam_beta1']:g} and {recipe['adam_beta2']:g}, epsilon "
            f"{recipe['adam_epsilon']:g}, weight decay {recipe['weight_decay']:g} of {decayed}"
            + f", {summary['optim_args']}"
            * bool(summary["optim_args"])
        )
    made = summary["optimizer"]
    return f"{made['class']} of {made['function']}: {'; '.join(map(_group_of, made['groups']))}"


def _group_of(group):
    rule = f" by {group['rule']}" if "rule" in group else ""
    rule += f" in {group['parts']} parts each" if group.get("parts", 1) > 1 else ""
    values = [f"{title} {group[name]}" for name, title in TITLES.items() if name in group]
    return ", ".join([f"{group['num_tensors']} tensors{rule}", *values])


def command_of(data: CorpusArguments, training: PretrainingArguments, functions: dict[str, str]) -> str:
    """Return the command that repeats a run; files and folders have their names alone, since a card is public.

    Args:
        data: Arguments of the run.
        training: Arguments of the run.
        functions: Names of the functions that `pretrain` got, by argument; a command line cannot give them.
    """
    recipe = load_recipe(training.recipe)
    recipe = recipe.second_phase() if training.phase == 2 else recipe
    defaults = asdict(recipe.replace(max_steps=training.max_steps)) | {"max_steps": recipe.max_steps}
    values = asdict(training.to_recipe())
    chosen = {name: values[name] for name in VALUES if values[name] != defaults[name]}
    for item in (*fields(data), *(item for item in fields(training) if item.name in REPEATED)):
        value = getattr(training if hasattr(training, item.name) else data, item.name)
        if value != item.default and item.name not in ("documents_dir", "num_processes"):
            chosen[item.name] = value
    words = ["python", "examples/pretrain_mlm.py"]
    for name, value in chosen.items():
        values = value if isinstance(value, list | tuple) else [getattr(value, "value", value)]
        words += [f"--{name}", *(Path(str(v)).name if Path(str(v)).exists() else str(v) for v in values)]
    command = shlex.join(words)
    if functions:
        given = ", ".join(f"{name}={function}" for name, function in functions.items())
        command = f"pretrain(data, training, {given}) with the arguments of: {command}"
    return command


def plot_curves(log: list[dict], file: Path) -> None:
    """Plot loss, masked accuracy, learning rate and gradient norm against the number of real tokens seen."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    panels = {
        "loss per masked token": ("loss", "eval_loss"),
        "masked accuracy": ("masked_accuracy", "eval_masked_accuracy"),
        "learning rate": ("learning_rate",),
        "gradient norm": ("grad_norm",),
    }
    tokens_at = {entry["step"]: entry["num_tokens"] for entry in log if "num_tokens" in entry}
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, panels.items()):
        for name in names:
            points = [(tokens_at[e["step"]], e[name]) for e in log if name in e and e["step"] in tokens_at]
            if points:
                label = "held out" if name.startswith("eval") else "training"
                axes.plot(*zip(*points), label=label, marker="." if len(points) < 20 else None)
        axes.set_title(title)
        axes.set_xlabel("real tokens seen")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
    figure.savefig(file, dpi=120)
