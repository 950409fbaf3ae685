"""Render the tables of README.md from the code and from benchmarks/results/*.json.

    python benchmarks/render_tables.py            (write)
    python benchmarks/render_tables.py --check    (exit status 1 if README.md is not what would be written)

A table stands between `<!-- table:NAME -->` and `<!-- end -->`.
"""

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate
from transformers import HfArgumentParser

from neobert_hf import AUTO_CLASSES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


@dataclass
class RenderArguments:
    """Whether to write."""

    check: bool = field(default=False, metadata={"help": "Write nothing; fail if README.md is out of date."})


def _result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def _source(result: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['processor']}, {result['cores']} cores, {versions}, commit {result['commit']}"


def auto_classes() -> str:
    """The Auto classes and what each of them loads."""
    rows = [[f"`{name}`", f"`{loaded.__name__}`", _first_line(loaded)] for name, loaded in AUTO_CLASSES.items()]
    return tabulate(rows, headers=["Auto class", "loads", ""], tablefmt="github")


def _first_line(documented) -> str:
    return documented.__doc__.strip().splitlines()[0].rstrip(".")


def agreement() -> str:
    """Errors against the oracle."""
    result = _result("agreement")
    table = tabulate(result["rows"], headers="keys", tablefmt="github", floatfmt=".1e")
    settings = result["settings"]
    return (
        f"{table}\n\nLargest error of the logits over their largest value; {settings['num_hidden_layers']} layers, "
        f"random weights, documents of {', '.join(map(str, settings['lengths']))} tokens; {_source(result)}."
    )


def demo() -> str:
    """What the demo reaches."""
    result = _result("demo")
    rows = [[name, share] for name, share in result["masked_accuracy"].items()]
    table = tabulate(rows, headers=["guess", "masked tokens right"], tablefmt="github", floatfmt=".1%")
    return f"{table}\n\nOn {result['num_held_out']} held-out documents; {result['seconds']:.0f} s in all; {_source(result)}."


TABLES = {"auto_classes": auto_classes, "agreement": agreement, "demo": demo}


def render(text: str) -> str:
    """Return `text` with every table replaced by its current form.

    Raises:
        KeyError: The text does not hold each table once.
    """
    marker = re.compile(r"<!-- table:(\w+) -->\n.*?<!-- end -->", re.DOTALL)
    found = marker.findall(text)
    if sorted(found) != sorted(TABLES):
        raise KeyError(f"README.md has the tables {found}, expected each of {list(TABLES)} once")
    return marker.sub(lambda match: f"<!-- table:{match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->", text)


def main():
    """Write README.md, or check it."""
    (arguments,) = HfArgumentParser(RenderArguments).parse_args_into_dataclasses()
    readme = ROOT / "README.md"
    before = readme.read_text("utf-8")
    after = render(before)
    if arguments.check and after != before:
        sys.exit("README.md is out of date: run python benchmarks/render_tables.py and commit it")
    if not arguments.check:
        readme.write_text(after, "utf-8")


if __name__ == "__main__":
    main()
