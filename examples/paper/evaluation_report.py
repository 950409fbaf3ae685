"""Tables and figures of results, and the model cards that they go to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from glue import TABLE_3, TABLE_3_TASKS, TASKS
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from tabulate import tabulate

FIRST, LAST = "<!-- table:evaluation -->", "<!-- end -->"  # of the section in a model card


def glue_table(summary: dict) -> str:
    """Return a Markdown table: for each task mean, standard deviation over seeds, metrics of the best run and its setting.

    Args:
        summary: Result of `glue_runs.run_suite`.
    """
    rows = []
    for task in summary["tasks"]:
        metrics = ", ".join(f"{name} {value:.1f}" for name, value in task["metrics"].items() if name != "score")
        batch_size, learning_rate, weight_decay = task["setting"].values()
        rows.append(
            {
                "task": task["task"],
                "score": _mean(task),
                "seeds": len(task["scores"]),
                "best run": metrics,
                "batch, lr, decay": f"{batch_size}, {learning_rate:g}, {weight_decay:g}",
                "start": "MNLI" if task["start"] != summary["model"] else "",
            }
        )
    if summary["average"] is not None:
        rows.append({"task": "average", "score": f"{summary['average']:.1f}"})
    return tabulate(rows, headers="keys", tablefmt="github")


def _mean(task: dict) -> str:
    spread = task["standard_deviation"]
    return f"{task['mean']:.1f}" + ("" if spread is None else f" ± {spread:.1f}")


def plot_glue(summary: dict) -> Figure:
    """Return bars of the scores beside those of Table 3, for the tasks that have run."""
    results = {task["task"]: task for task in summary["tasks"]}
    tasks = [task for task in TABLE_3_TASKS if task in results]
    models = {name: dict(zip(TABLE_3_TASKS, scores)) for name, scores in TABLE_3.items()}
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    positions, width = np.arange(len(tasks)), 0.8 / (len(models) + 1)
    for i, (name, scores) in enumerate(models.items()):
        axes.bar(positions + i * width, [scores[task] for task in tasks], width, label=f"{name} (paper)", alpha=0.6)
    errors = [results[task]["standard_deviation"] or 0 for task in tasks]
    last = positions + len(models) * width
    axes.bar(last, [results[task]["mean"] for task in tasks], width, yerr=errors, color="black", label="this run")
    axes.set_xticks(positions + 0.4 - width / 2, tasks)
    axes.set_ylabel("score on the development set")
    axes.legend(ncols=3, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def evaluation_report(result: dict, for_card: bool = False) -> str:
    """Return a result of examples/paper/evaluate_model.py as Markdown: two tables, and how they were measured.

    Args:
        result: The result.
        for_card: Leave out batches, number of seeds, machine and versions, which a reader of model cards does not look for.
    """
    perplexity = result["pseudo_perplexity"]
    scores = [
        (task["task"], " and ".join(TASKS[task["task"]].metrics), _mean(task), len(task["scores"]))[
            : 3 if for_card else 4
        ]
        for task in result["glue"]
    ]
    starts = [1, *(point["up_to"] + 1 for point in perplexity["by_length"])]
    medians = [
        (f"{start:,} to {point['up_to']:,}", point["texts"], f"{point['median']:.1f}")
        for start, point in zip(starts, perplexity["by_length"])
    ]
    training = f"Fine-tuned with {result['max_steps']:,} batches of 32 rows at a learning rate of {result['learning_rate']:g}. "
    place = f", each with its best evaluation. {_place(result)}"
    if for_card:
        training, place = "", ""
    parts = [
        "### GLUE",
        tabulate(scores, ["task", "metric", "score", "seeds"][: 3 if for_card else 4], "github"),
        f"Development sets. {training}Mean and standard deviation over the seeds{place}.",
        "### Pseudo-perplexity by length",
        tabulate(medians, ["tokens", "texts", "pseudo-perplexity"], "github"),
        f"Medians over {perplexity['texts']:,} texts of at most {perplexity['max_seq_length']:,} tokens, each with a sample of "
        f"its positions. The median of all of them is {perplexity['median']:.1f}.",
    ]
    return "\n\n".join(parts)


def _place(result: dict) -> str:
    """Dtype, machine and versions of a result."""
    machine = result["gpu"] or f"{result['cores']} cores of {result['processor']}, {result['instructions']}"
    return ", ".join([result["dtype"], machine, *map(" ".join, result["versions"].items())])


def mteb_tables(result: dict) -> str:
    """Return a result of examples/paper/evaluate_mteb.py as Markdown: means and seconds of the models, scores of the tasks."""
    models, rows = result["models"], []
    for model in models:
        seconds = [score["seconds"] for score in model["scores"]]
        means = {name: None if mean is None else f"{mean:.2f}" for name, mean in model["averages"].items()}
        total = "" if None in seconds else f"{sum(seconds):,.0f}"
        rows.append({"model": model["model"], **means, "seconds": total, "prompts": model["prompts"]})
    scores = {(m["model"], score["task"]): f"{score['score']:.2f}" for m in models for score in m["scores"]}
    tasks = [
        {"task": task, "type": kind}
        | ({"texts": result["num_texts"][task]} if any(result["num_texts"].values()) else {})
        | {model["model"]: scores.get((model["model"], task)) for model in models}
        for task, kind in result["types"].items()
    ]
    options = {"headers": "keys", "tablefmt": "github", "disable_numparse": True, "missingval": ""}
    parts = [f"### {result['benchmark_name']}", tabulate(rows, **options), tabulate(tasks, **options)]
    parts.append(f"{_place(result)}, mteb {result['mteb']}.")
    if missing := sorted({task for model in models for task in model["missing"]}):
        parts.append(f"A mean is empty while one of its tasks has no score: {', '.join(missing)}.")
    reasons = [f"- {task}: {reason}" for model in models for task, reason in model["without_score"].items()]
    parts += ["\n".join(dict.fromkeys(reasons))] if reasons else []
    return "\n\n".join(parts)


def write_card_section(file: str | Path, content: str) -> None:
    """Write Markdown into a model card, between two comments; a card without them gets a section Evaluation at its end.

    Raises:
        ValueError: The second comment is missing.
        OSError: The card does not exist.
    """
    card = ModelCard.load(file)
    if FIRST not in card.text:
        card.text = f"{card.text.rstrip()}\n\n## Evaluation\n\n{FIRST}\n{LAST}\n"
    before, _, rest = card.text.partition(FIRST)
    if LAST not in rest:
        raise ValueError(f"{file} has {FIRST} without {LAST}; write the latter where the section ends")
    card.text = f"{before}{FIRST}\n{content}\n{LAST}{rest.partition(LAST)[2]}"
    card.save(file)
