"""Download the paper's training sets (Table 7), and write each as a Parquet file of anchor, positive and negatives.

    python examples/paper/embeddings/prepare_sets.py
    python examples/paper/embeddings/prepare_sets.py --names STSBENCHMARK QQP

The files go to the folder `sets` beside `sets.yaml`, whose fields say where the texts of a set are:

- path: id on the Hub; configs: configurations to concatenate, by default the only one;
- columns: places of anchor, positive and negatives: a column, an item in it such as `set.pos.0`, or a template such as
  `"{title} {body}"`; by default all columns in their order. A row without one of the texts is dropped;
- above: `{score: 4}` keeps the rows whose score is above 4;
- choices: `{answer: {cop: [opa, opb]}}` is a further column for templates, the one of the list that `cop` numbers;
- has_ids: rows are pairs of ids; the texts are in the configurations "queries" and "corpus";
- class_column: rows are labelled texts; the positive is another text of the class, the negative one of another class.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from datasets import Dataset, concatenate_datasets, load_dataset

from neobert_hf.runs import run_script


@dataclass
class SetsArguments:
    """The list of sets."""

    sets: str = field(default=str(Path(__file__).with_name("sets.yaml")), metadata={"help": "YAML file of the sets."})
    names: list[str] = field(default=None, metadata={"help": "Names of the sets to download. Default: all."})
    seed: int = field(default=0, metadata={"help": "Seed of the pairs drawn within a class."})


def load_set(entry: dict, seed: int = 0) -> Dataset:
    """Load a set from the Hub, by its entry in the list.

    Returns:
        Columns `anchor`, `positive`, and `negative_1` to `negative_n`.

    Raises:
        ValueError: The columns of the set on the Hub have changed.
    """
    if entry.get("has_ids"):
        return join_ids(entry["path"])
    parts = [load_dataset(entry["path"], config, split="train") for config in entry.get("configs", [None])]
    options = {"batched": True, "fn_kwargs": {"entry": entry}, "desc": entry["path"]}
    rows = concatenate_datasets([part.map(texts_of, remove_columns=part.column_names, **options) for part in parts])
    return class_triplets(rows, seed) if "class_column" in entry else rows


def texts_of(batch: dict[str, list], entry: dict) -> dict[str, list[str]]:
    """Convert a batch of rows of the Hub to rows of texts."""
    places, label, rows = list(entry.get("columns", batch)), entry.get("class_column"), []
    for values in zip(*batch.values()):
        row = dict(zip(batch, values))
        try:
            for name, choice in entry.get("choices", {}).items():
                ((number, columns),) = choice.items()
                row[name] = row[columns[row[number]]]
            texts = [text_at(row, place) for place in places]
            is_kept = all(texts) and all(row[name] > least for name, least in entry.get("above", {}).items())
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{entry['path']} has the columns {', '.join(batch)} and not the expected ones ({error}); the set on the Hub "
                "has changed"
            ) from error
        if is_kept:
            rows.append([*texts, row[label]] if label else texts)
    names = ["anchor", "label"] if label else column_names(len(places))
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def column_names(width: int) -> list[str]:
    """Return the names of `width` columns of texts."""
    return ["anchor", "positive", *(f"negative_{i}" for i in range(1, width - 1))]


def text_at(row: dict, place: str) -> str | None:
    """Return the text at a place of a row; None if a list is too short, or a field of a template is empty."""
    if names := re.findall(r"\{(\w+)\}", place):
        return place.format(**row) if all(row[name] for name in names) else None
    value = row
    for part in place.split("."):
        if isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else None
        elif value is not None:
            value = value[part]
    return value


def join_ids(path: str) -> Dataset:
    """Replace pairs of ids by pairs of texts; drop a pair with a missing text, as the authors' code does."""
    pairs = load_dataset(path, "default", split="train")
    queries, corpus = (load_dataset(path, name, split=name) for name in ("queries", "corpus"))
    query_rows, corpus_rows = ({key: i for i, key in enumerate(part["_id"])} for part in (queries, corpus))
    found = [
        (query_rows[query], corpus_rows[document])
        for query, document, score in zip(pairs["query-id"], pairs["corpus-id"], pairs["score"])
        if score > 0 and query in query_rows and document in corpus_rows
    ]
    columns = [
        part.select(list(rows)).select_columns("text").rename_column("text", name)
        for name, part, rows in zip(("anchor", "positive"), (queries, corpus), zip(*found))
    ]
    joined = concatenate_datasets(columns, axis=1)
    return joined.filter(lambda row: row["anchor"] and row["positive"])


def class_triplets(rows: Dataset, seed: int) -> Dataset:
    """Draw for each text a positive of its class and a negative of another class; drop classes with a single text."""
    texts, labels = list(rows["anchor"]), np.asarray(list(rows["label"]))
    rng = np.random.default_rng(seed)
    order = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    triplets = []
    for start, count in zip(starts, counts):
        own = order[start : start + count]
        if count > 1:
            positives = own[(np.arange(count) + rng.integers(1, count, count)) % count]
            others = rng.integers(0, len(order) - count, count)
            negatives = order[np.where(others < start, others, others + count)]
            triplets += zip(own.tolist(), positives.tolist(), negatives.tolist())
    return Dataset.from_dict({name: [texts[t[i]] for t in triplets] for i, name in enumerate(column_names(3))})


def read_yaml(file: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds names with values; JSON is YAML too.

    Raises:
        ValueError: It is damaged or holds something else.
        OSError: It cannot be read.
    """
    try:
        content = yaml.safe_load(Path(file).read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no YAML in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; give a line NAME: VALUE for each set")
    return content


def prepare(arguments: SetsArguments):
    """Write a file for each set; files that are there stay."""
    listed = read_yaml(arguments.sets)
    if unknown := [name for name in arguments.names or () if name not in listed]:
        raise ValueError(f"{arguments.sets} has no set {', '.join(unknown)}; its sets are {', '.join(listed)}")
    for name in arguments.names or listed:
        file = Path(arguments.sets).parent / listed[name]["file"]
        if not file.exists():
            rows = load_set(listed[name], arguments.seed)
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".part")
            rows.to_parquet(partial)
            partial.replace(file)
            print(f"{file}: {len(rows):,} rows", flush=True)


def main():
    """Read the command line, and prepare."""
    run_script(prepare, __doc__)


if __name__ == "__main__":
    main()
