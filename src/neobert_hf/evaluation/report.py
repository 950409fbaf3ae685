"""Reports of an evaluation: one HTML page with tables and figures inside, and a section of a model card."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from huggingface_hub import ModelCard
from tabulate import tabulate

from .cards import load_card
from .glue import TASKS

PAGE = jinja2.Template(
    """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ccc; padding: 0.25rem 0.75rem; text-align: left }
img { max-width: 100% }
</style>
<h1>{{ title }}</h1>
{% for section in sections %}
<h2>{{ section.title }}</h2>
<p>{{ section.text }}</p>
{{ section.html_table() | safe }}
{% if section.figure %}<img alt="{{ section.title }}" src="data:image/png;base64,{{ section.image() }}">{% endif %}
{% endfor %}
</html>
""",
    autoescape=True,
    trim_blocks=True,
)
FIRST, LAST = "<!-- table:evaluation -->", "<!-- end -->"  # in a model card


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Args:
        title: Its heading.
        text: What was measured, and how.
        rows: Rows of its table, as dicts with the same keys.
        figure: A PNG file, which becomes part of the page.
    """

    title: str
    text: str
    rows: Sequence[dict] = ()
    figure: Path | None = None

    def html_table(self) -> str:
        """Return the table as HTML; its cells are escaped."""
        return tabulate(self.rows, headers="keys", tablefmt="html") if self.rows else ""

    def image(self) -> str:
        """Return the figure in base64."""
        return base64.b64encode(self.figure.read_bytes()).decode()


def markdown(sections: Sequence[Section]) -> str:
    """Return headings, tables and texts as Markdown, without the figures."""
    parts = []
    for section in sections:
        table = [tabulate(section.rows, headers="keys", tablefmt="github")] if section.rows else []
        parts += [f"### {section.title}", *table, section.text]
    return "\n\n".join(parts)


def evaluation_sections(result: dict, figures: Path) -> list[Section]:
    """Return the sections of a result of examples/evaluate_model.py.

    Args:
        result: Content of evaluation.json.
        figures: Folder of the figures.
    """
    machine = result["gpu"] or f"{result['cores']} cores of {result['processor']}, {result['instructions']}"
    machine = f"{result['dtype']}, {machine}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    perplexity = result["pseudo_perplexity"]
    rows = [
        {
            "task": task["task"],
            "metric": " and ".join(TASKS[task["task"]].metrics),
            "score": f"{task['mean']:.1f}"
            + ("" if task["standard_deviation"] is None else f" ± {task['standard_deviation']:.1f}"),
            "seeds": len(task["scores"]),
        }
        for task in result["glue"]
    ]
    lengths = [0, *(point["up_to"] for point in perplexity["by_length"])]
    return [
        Section(
            "GLUE",
            f"Development sets. Fine-tuned with {result['max_steps']:,} batches of 32 rows at a learning rate of "
            f"{result['learning_rate']:g}. Mean and standard deviation over the seeds, each with its best evaluation. "
            f"{machine}, {versions}.",
            rows,
            figures / "glue.png",
        ),
        Section(
            "Pseudo-perplexity by length",
            f"Medians over {perplexity['texts']:,} texts of at most {perplexity['max_seq_length']:,} tokens, each with a sample "
            f"of its positions. The median of all of them is {perplexity['median']:.1f}.",
            [
                {
                    "tokens": f"{before + 1:,} to {point['up_to']:,}",
                    "texts": point["texts"],
                    "pseudo-perplexity": f"{point['median']:.1f}",
                }
                for before, point in zip(lengths, perplexity["by_length"])
            ],
            figures / "pseudo-perplexity" / "by_length.png",
        ),
    ]


def write_page(folder: str | Path, title: str, sections: Sequence[Section]) -> Path:
    """Write index.html, which needs no other file, and return its path.

    Raises:
        OSError: A figure cannot be read, or the page cannot be written.
    """
    file = Path(folder, "index.html")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(PAGE.render(title=title, sections=sections), "utf-8")
    return file


def read_card(file: str | Path) -> ModelCard:
    """Read a model card whose section a report can replace; one without section gets an empty one under a new heading at its end.

    Raises:
        ValueError: The second comment of the section is missing, or as of `load_card`.
        OSError: As of `load_card`.
    """
    card = load_card(file)
    if FIRST not in card.text:
        card.text = f"{card.text.rstrip()}\n\n## Evaluation\n\n{FIRST}\n{LAST}\n"
    if LAST not in card.text.partition(FIRST)[2]:
        raise ValueError(f"{file} has {FIRST} without {LAST}; write the latter where the section ends")
    return card


def write_card_section(file: str | Path, sections: Sequence[Section]) -> None:
    """Write the sections into a model card, between two comments; the errors are those of `read_card`."""
    card = read_card(file)
    before, _, rest = card.text.partition(FIRST)
    card.text = f"{before}{FIRST}\n{markdown(sections)}\n{LAST}{rest.partition(LAST)[2]}"
    card.save(file)


def long_context_table(result: dict) -> str:
    """Return a Markdown table: a row for each scaling, a column for each length."""
    rows = {}
    for point in result["points"]:
        shown = f"{point['pseudo_perplexity']:.1f} ({point['low']:.1f} to {point['high']:.1f})"
        rows.setdefault(point["scaling"], {"scaling": point["scaling"]})[f"{point['length']:,} tokens"] = shown
    return tabulate(list(rows.values()), headers="keys", tablefmt="github")
