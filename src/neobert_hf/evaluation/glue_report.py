"""Table and figure of GLUE results beside the paper's Table 3."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from tabulate import tabulate

from .glue import TABLE_3, TABLE_3_TASKS


def table(summary: dict) -> str:
    """Return a Markdown table: for each task mean, standard deviation over seeds, metrics of the best run and its setting.

    Args:
        summary: Result of `glue_runs.run_suite`.
    """
    rows = []
    for each in summary["tasks"]:
        metrics = ", ".join(f"{name} {value:.1f}" for name, value in each["metrics"].items() if name != "score")
        batch_size, learning_rate, weight_decay = each["setting"].values()
        spread = each["standard_deviation"]
        rows.append(
            {
                "task": each["task"],
                "score": f"{each['mean']:.1f}" + ("" if spread is None else f" ± {spread:.1f}"),
                "seeds": len(each["scores"]),
                "best run": metrics,
                "batch, lr, decay": f"{batch_size}, {learning_rate:g}, {weight_decay:g}",
                "start": "MNLI" if each["start"] != summary["model"] else "",
            }
        )
    if summary["average"] is not None:
        rows.append({"task": "average", "score": f"{summary['average']:.1f}"})
    return tabulate(rows, headers="keys", tablefmt="github")


def plot(summary: dict) -> Figure:
    """Return bars of the scores beside those of Table 3, for the tasks that have run."""
    means = {each["task"]: each for each in summary["tasks"]}
    tasks = [task for task in TABLE_3_TASKS if task in means]
    models = {name: dict(zip(TABLE_3_TASKS, scores)) for name, scores in TABLE_3.items()}
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    positions, width = np.arange(len(tasks)), 0.8 / (len(models) + 1)
    for i, (name, scores) in enumerate(models.items()):
        axes.bar(positions + i * width, [scores[task] for task in tasks], width, label=f"{name} (paper)", alpha=0.6)
    errors = [means[task]["standard_deviation"] or 0 for task in tasks]
    last = positions + len(models) * width
    axes.bar(last, [means[task]["mean"] for task in tasks], width, yerr=errors, color="black", label="this run")
    axes.set_xticks(positions + 0.4 - width / 2, tasks)
    axes.set_ylabel("score on the development set")
    axes.legend(ncols=3, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure
