"""A stored result, its source in words, and a table of its columns."""

import json
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


def result_of(name: str) -> dict:
    """The stored result `name`.json."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def machine(result: dict) -> str:
    """Cores, processor and instructions of a result."""
    # Results without this entry are older than it; all of them are of one kind of machine.
    instructions = result.get("instructions", "AVX-512 with bf16")
    return f"{result['cores']} cores of {result['processor']}, {instructions}"


def source(result: dict) -> str:
    """Machine, versions and commit of a result."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{machine(result)}, {versions}, commit {result['commit']}"


def measured(result: dict) -> str:
    """Spread and source of speeds."""
    spreads = sorted(row["spread"] for row in result["rows"])
    return (
        f"Half the distance between the slowest and the fastest turn is {spreads[len(spreads) // 2]:.1%} of the median "
        f"typically, {spreads[-1]:.0%} at most: {source(result)}"
    )


def rows_of(name: str, columns: dict[str, tuple[str, str]]) -> str:
    """The table of a stored result's rows: a heading, and the key and format of its cells, for each column."""
    result = result_of(name)
    return table_of(result["rows"], columns, result)


def table_of(rows: list[dict], columns: dict[str, tuple[str, str]], result: dict) -> str:
    """The table of `rows`, with the dtype and the source of the result that they belong to; without empty columns."""
    columns = {head: column for head, column in columns.items() if any(row.get(column[0]) is not None for row in rows)}
    cells = [["" if row.get(key) is None else format(row[key], form) for key, form in columns.values()] for row in rows]
    table = tabulate(cells, headers=list(columns), tablefmt="github", disable_numparse=True)
    dtype = [result["settings"]["dtype"]] if "dtype" in result["settings"] and "dtype" not in columns else []
    return f"{table}\n\n{', '.join([*dtype, source(result)])}."
