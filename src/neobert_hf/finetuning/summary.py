"""The lines at the end of a fit: scores beside those of simpler answers, and the classes with the lowest ones."""

from __future__ import annotations

from collections.abc import Mapping

from tabulate import tabulate

from ..files.messages import say

MOST_SHOWN = 5  # classes in a line
WIDTH = 40  # of a name, in characters


def say_scores(title: str, scores: Mapping[str, Mapping[str, float]]) -> None:
    """Tell a table with a line for each answer: its name, and its metrics."""
    lines = [[name[:WIDTH], *metrics.values()] for name, metrics in scores.items()]
    names = next(iter(scores.values()))
    say(tabulate(lines, [title, *names], tablefmt="plain", floatfmt=".4f", disable_numparse=[0]))


def say_worst(scores: Mapping[str, float]) -> None:
    """Tell the classes with the lowest F1."""
    worst = sorted(scores.items(), key=lambda item: item[1])[:MOST_SHOWN]
    if len(scores) > 1:
        say("lowest f1: " + ", ".join(f"{name[:WIDTH]} {value:.3f}" for name, value in worst))
