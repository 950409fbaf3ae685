"""The lines at the end of a fit: scores beside those of simpler answers, and the classes with the lowest ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..files.messages import say, say_next
from ..files.output import writing

MOST_SHOWN = 5  # classes in a line
TOLD = ("README.md", "*_results.json", "classification_report_*.txt", "predictions.*")  # files for a reader
WIDTH = 40  # of a name, in characters


def say_scores(title: str, scores: Mapping[str, Mapping[str, float]]) -> None:
    """Tell a table with a line for each answer: its name, and its metrics."""
    from tabulate import tabulate  # other trainings use `say_saved` without it

    lines = [[name[:WIDTH], *metrics.values()] for name, metrics in scores.items()]
    names = next(iter(scores.values()))
    say(
        tabulate(
            lines,
            [title, *names],
            tablefmt="plain",
            floatfmt=".4f",
            disable_numparse=[0],
        )
    )


def say_worst(scores: Mapping[str, float]) -> None:
    """Tell the classes with the lowest F1."""
    worst = sorted(scores.items(), key=lambda item: item[1])[:MOST_SHOWN]
    if len(scores) > 1:
        say("lowest f1: " + ", ".join(f"{name[:WIDTH]} {value:.3f}" for name, value in worst))


def write_report(file: Path, table: str) -> None:
    """Write a report on each class."""
    with writing(file) as stream:
        stream.write(table.encode())


def say_saved(folder: str | Path, *options: str, test_file: str | None = None) -> None:
    """Tell what the folder of a trained model has for a reader, and the commands that may follow.

    Args:
        folder: Folder of the model, or of an adapter.
        options: Options of `neobert predict`.
        test_file: Name of a file that it reads; None if the model predicts nothing of rows.
    """
    names = [file.name for pattern in TOLD for file in sorted(Path(folder).glob(pattern))]
    shown = ", ".join(names)
    commands: list[tuple] = []
    if test_file:
        commands.append(("predict", folder, test_file, *options))
    if Path(folder, "adapter_config.json").exists():
        say(f"{folder} has the adapter, {shown}")
    else:
        say(f"{folder} has the model, {shown}")
        commands += [("serve", folder), ("export", folder, f"{folder}-exported")]
    say_next(*(("neobert", *words) for words in commands))
