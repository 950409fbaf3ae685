"""Train several pretraining recipes on the same rows, and say with an interval which one learns more.

    python examples/documentation_search/corpus.py --output_dir runs/documentation --vocab_size 4096
    python examples/ablation/ablate.py --arms examples/ablation/arms.yaml --output_dir runs/ablation

The file holds arguments of `neobert pretrain-mlm` for each arm; the first arm is the baseline. The same command continues after
an interruption. Under `accelerate launch --num_processes 4`, each process trains runs of its own on its device.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ablation import ablate, read_ablation
from matplotlib.figure import Figure
from tabulate import tabulate
from transformers.hf_argparser import HfArg

from neobert_hf.runs import run_script

TITLES = (
    "arm",
    "parameters",
    "tokens",
    "held-out loss",
    "accuracy",
    "same",
    "difference",
    "95 %: documents",
    "95 %: seeds",
)


@dataclass
class AblationArguments:
    """Which arms to compare, and how."""

    arms: str = HfArg(help="YAML file with arms, and perhaps seeds and common.")
    output_dir: str = HfArg(default="runs/ablation", help="Folder of the runs, the table, the figures and the plot.")
    stop_early: bool = HfArg(default=False, help="Train no further seed of an arm whose sign is settled.")
    per_character: bool = HfArg(default=False, help="Compare per character, for arms with different tokenizers.")


def run(arguments: AblationArguments):
    """Train the arms, and write ablation.json, ablation.md and ablation.png."""
    report = ablate(read_ablation(arguments.arms), arguments.output_dir, arguments.stop_early, arguments.per_character)
    if report is not None:
        folder, rows = Path(arguments.output_dir), [row_of(name, arm) for name, arm in report["arms"].items()]
        table = tabulate(rows, TITLES, tablefmt="github", disable_numparse=True)
        (folder / "ablation.md").write_text(f"Loss per {report['unit']}.\n\n{table}\n")
        plot(report, folder).savefig(folder / "ablation.png", dpi=120)
        print(table)


def row_of(name: str, arm: dict) -> list:
    """Return the row of an arm in the table."""
    if "loss" not in arm:
        return [name, *[""] * 5, f"diverged with seed {', '.join(arm['diverged'])}", "", ""]
    name += f" (diverged with seed {', '.join(arm['diverged'])})" if arm["diverged"] else ""
    same = "rows and masks" if arm["same_masks"] else "rows" if arm["same_rows"] else "neither"
    size = f"{arm['num_parameters'] / 1e6:.2f} M", f"{arm['num_tokens'] / 1e6:.1f} M"
    difference = f"{arm['difference']:+.4f}" if "interval" in arm else "baseline"
    intervals = [arm.get("interval"), arm.get("interval_of_seeds")]
    intervals = [f"{found[0]:+.4f} to {found[1]:+.4f}" if found else "" for found in intervals]
    return [name, *size, f"{arm['loss']:.4f}", f"{arm['masked_accuracy']:.3f}", same, difference, *intervals]


def plot(report: dict, folder: Path) -> Figure:
    """Draw the training loss of the arms with the range over the seeds, and their differences from the baseline."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    for name, arm in report["arms"].items():
        if "loss" in arm:
            logs = [(folder / f"{name}-{seed}/metrics.jsonl").read_text().splitlines() for seed in arm["loss_by_seed"]]
            seeds = [{e["step"]: e["loss"] for e in map(json.loads, log) if "loss" in e} for log in logs]
            steps = sorted(set.intersection(*map(set, seeds)))  # an interrupted run has a log more
            losses = np.array([[of_seed[step] for step in steps] for of_seed in seeds])
            (line,) = curves.plot(steps, losses.mean(0), label=name)
            curves.fill_between(steps, losses.min(0), losses.max(0), alpha=0.2, color=line.get_color())
    curves.set(xlabel="optimizer step", ylabel="loss per masked token", title="training: mean and range over the seeds")
    curves.legend()
    compared = {name: arm for name, arm in report["arms"].items() if "interval" in arm}
    for key, label, color, width, height in (
        ("interval", "over the documents, for these models", "C0", 6, 0.1),
        ("interval_of_seeds", "over the seeds", "C3", 2, -0.1),
    ):
        drawn = [(place + height, *arm[key]) for place, arm in enumerate(compared.values()) if arm[key]]
        label += "" if drawn else ": needs two seeds"
        differences.hlines(*np.reshape(drawn, (-1, 3)).T, color=color, lw=width, label=label)
    differences.plot([arm["difference"] for arm in compared.values()], range(len(compared)), "ko", label="difference")
    differences.axvline(0, color="gray", ls="--")
    differences.set_yticks(range(len(compared)), list(compared))
    differences.set_ylim(-0.5, len(compared) + 0.5)  # room for the legend
    differences.legend(loc="upper center", fontsize="small")
    differences.set(
        xlabel=f"loss per {report['unit']} - that of {report['baseline']}", title="held out: 95 % intervals"
    )
    return figure


def main():
    """Read the command line, and run the ablation."""
    run_script(run, __doc__)


if __name__ == "__main__":
    main()
