"""Pairs and triplets for contrastive training: the paper's training sets (appendix D.2, Table 7), and users' own files.

Hub ids and columns follow the authors' public loaders. Five sets of Table 7 have no public loader (AGNEWS, MEDMCQA,
MEDMCQA_CLUST, NPR, YAHOO_CLUST): for them, the id is the Hub dataset of that name, and the choice of columns is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset

from ..files.rows import checked_text, read_rows

Texts = list[str] | None  # anchor, positive, negatives; None drops the row

MOST_HELD_OUT = 1000  # rows of a set; more rows cost time and hardly change the metrics


def _columns(*names: str) -> Callable[[dict], Texts]:
    return lambda row: [row[name] for name in names]


def _similar(row: dict) -> Texts:
    return [row["sentence1"], row["sentence2"]] if row["score"] > 4 else None  # scores are 0 to 5


def _concurrentqa(row: dict) -> Texts:
    return [row["question"], row["pos_paras"][0]["text"], *(p["text"] for p in row["neg_paras"])]


def _first_of_lists(row: dict) -> Texts:
    return [row["query"], row["positive"][0], *row["negative"]]


def _medmcqa_answer(row: dict) -> Texts:
    return [f"{row['question']} {row[('opa', 'opb', 'opc', 'opd')[row['cop']]]}"]


def _medmcqa(row: dict) -> Texts:
    return [row["question"], row["exp"]] if row["exp"] else None


@dataclass(frozen=True)
class TrainingSet:
    """Hub id of a training set, and the rule that turns its rows into texts.

    Args:
        path: Id on the Hub.
        texts: Function from a row to anchor, positive and negatives, or to None to drop the row.
        configs: Configurations to concatenate; None stands for the only configuration.
        num_negatives: Number of negatives to keep; a row with fewer is dropped.
        has_ids: Rows are pairs of ids; the texts are in the configurations "queries" and "corpus".
        class_column: Rows are labelled texts; the positive is another text of the same class, the negative a text of another
            class.
    """

    path: str
    texts: Callable[[dict], Texts]
    configs: tuple[str | None, ...] = (None,)
    num_negatives: int = 0
    has_ids: bool = False
    class_column: str | None = None


TRAINING_SETS = {
    "AGNEWS": TrainingSet("sentence-transformers/agnews", _columns("title", "description")),
    "ALLNLI": TrainingSet(
        "sentence-transformers/all-nli", _columns("anchor", "positive", "negative"), ("triplet",), num_negatives=1
    ),
    "AMAZONQA": TrainingSet("embedding-data/Amazon-QA", lambda row: [row["query"], row["pos"][0]]),
    "CONCURRENTQA": TrainingSet("stanfordnlp/concurrentqa-retrieval", _concurrentqa, num_negatives=4),
    "FEVER": TrainingSet("mteb/fever", _columns("query", "document"), has_ids=True),
    "GITHUBISSUE": TrainingSet("WhereIsAI/github-issue-similarity", _columns("anchor", "positive"), ("positive",)),
    "GOOAQ": TrainingSet(
        "tomaarsen/gooaq-hard-negatives",
        _columns("question", "answer", *(f"negative_{i}" for i in range(1, 6))),
        ("triplet-5",),
        num_negatives=5,
    ),
    "MEDMCQA": TrainingSet("openlifescienceai/medmcqa", _medmcqa),
    "MEDMCQA_CLUST": TrainingSet(
        "openlifescienceai/medmcqa", _medmcqa_answer, num_negatives=1, class_column="subject_name"
    ),
    "MSMARCO": TrainingSet("mteb/msmarco", _columns("query", "document"), has_ids=True),
    "NPR": TrainingSet("sentence-transformers/npr", _columns("title", "body")),
    "PAQ": TrainingSet("embedding-data/PAQ_pairs", lambda row: list(row["set"])),
    "PUBMEDQA": TrainingSet(
        "sentence-transformers/pubmedqa",
        _columns("anchor", "positive", *(f"negative_{i}" for i in range(1, 21))),
        ("triplet-20",),
        num_negatives=4,
    ),
    "QQP": TrainingSet(
        "embedding-data/QQP_triplets",
        lambda row: [row["set"]["query"], row["set"]["pos"][0], *row["set"]["neg"]],
        num_negatives=1,
    ),
    "SENTENCECOMP": TrainingSet(
        "embedding-data/sentence-compression", lambda row: [row["set"][1], row["set"][0]]
    ),  # the compressed sentence is the anchor
    "STACKEXCHANGE": TrainingSet(
        "sentence-transformers/stackexchange-duplicates",
        lambda row: list(row.values()),
        ("body-body-pair", "post-post-pair"),
    ),
    "STACKOVERFLOW": TrainingSet("mteb/stackoverflowdupquestions-reranking", _first_of_lists, num_negatives=4),
    "STS12": TrainingSet("mteb/sts12-sts", _similar),
    "STSBENCHMARK": TrainingSet("mteb/stsbenchmark-sts", _similar),
    "TRIVIAQA": TrainingSet(
        "sentence-transformers/trivia-qa-triplet",
        _columns("anchor", "positive", "negative"),
        ("triplet",),
        num_negatives=1,
    ),
    "WIKIHOW": TrainingSet("sentence-transformers/wikihow", _columns("text", "summary")),
    "YAHOO_CLUST": TrainingSet(
        "community-datasets/yahoo_answers_topics",
        lambda row: [f"{row['question_title']} {row['best_answer']}"] if row["best_answer"] else None,
        num_negatives=1,
        class_column="topic",
    ),
}


# Public data for the two stages of contextual training (appendix G.2). The paper gives sizes only; CDE's public code uses these.
CONTEXTUAL_STAGES = {"unsupervised": "nomic-ai/nomic-embed-unsupervised-data", "supervised": "cfli/bge-full-data"}


def load_contextual_stage(stage: str) -> dict[str, Dataset]:
    """Load the pairs of a stage from the Hub, by source, since clusters and batches stay within a source.

    Returns:
        Datasets with the columns `query` and `document`.

    Raises:
        ValueError: The columns of the set on the Hub have changed.
    """
    parts = load_dataset(CONTEXTUAL_STAGES[stage])  # each split is a source
    if stage == "supervised":  # rows have lists of positives
        parts = {name: rows.map(lambda row: {"document": row["pos"][0]}, desc=name) for name, rows in parts.items()}
    return {name: rows.select_columns(["query", "document"]) for name, rows in parts.items()}


def ids_on_hub(arguments: Mapping, names: Iterable[str]) -> list[str]:
    """Return the ids on the Hub of the sets of a run, by its arguments and the names of its sets; none for files."""
    if arguments.get("train_files"):
        return []
    if stage := arguments.get("stage"):
        return [CONTEXTUAL_STAGES[stage]]
    return sorted({TRAINING_SETS[name].path for name in names})


def load_training_set(name: str, seed: int = 0) -> Dataset:
    """Load one of the paper's training sets from the Hub.

    Args:
        name: Name as in Table 7.
        seed: Seed of the pairs drawn within a class; other sets do not use it.

    Returns:
        Columns `anchor`, `positive`, and `negative_1` to `negative_n`.

    Raises:
        ValueError: The columns of the set on the Hub have changed.
    """
    source = TRAINING_SETS[name]
    if source.has_ids:
        parts = [_join(source.path)]
    else:
        parts = [load_dataset(source.path, config, split="train") for config in source.configs]
    options = dict(batched=True, fn_kwargs={"name": name}, desc=name)
    rows = concatenate_datasets([part.map(_convert, remove_columns=part.column_names, **options) for part in parts])
    return _class_triplets(rows, seed) if source.class_column else rows


def _convert(batch: dict[str, list], name: str) -> dict[str, list[str]]:
    """Convert a batch of Hub rows to rows of texts; drop the rows that the set excludes."""
    source, rows = TRAINING_SETS[name], []
    labels = [source.class_column] if source.class_column else []
    names = ["anchor", "label"] if labels else _names(2 + source.num_negatives)
    width = len(names) - len(labels)
    for values in zip(*batch.values()):
        row = dict(zip(batch, values))
        try:
            texts, label = source.texts(row), [row[column] for column in labels]
        except IndexError:  # the list of positives is empty
            continue
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{name}: {source.path} has the columns {', '.join(batch)} and not the expected ones ({error}); the set on "
                "the Hub has changed, choose other training sets"
            ) from error
        if texts is not None and len(texts) >= width and all(texts[:width]):
            rows.append(texts[:width] + label)
    return {column: [row[i] for row in rows] for i, column in enumerate(names)}


def _names(width: int) -> list[str]:
    return ["anchor", "positive", *(f"negative_{i}" for i in range(1, width - 1))]


def _join(path: str) -> Dataset:
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
        for name, part, rows in zip(("query", "document"), (queries, corpus), zip(*found))
    ]
    return concatenate_datasets(columns, axis=1)


def _class_triplets(rows: Dataset, seed: int) -> Dataset:
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
    return Dataset.from_dict({name: [texts[t[i]] for t in triplets] for i, name in enumerate(_names(3))})


def read_pairs(file: str | Path) -> Dataset:
    """Read pairs or triplets from a file of rows.

    The order of the columns decides: anchor, positive, then negatives. Their names are ignored.

    Returns:
        Columns `anchor`, `positive`, and `negative_1` to `negative_n`.

    Raises:
        ValueError: A line has other columns than the first one, or an empty text; the message names the line.
        OSError: The file cannot be read.
    """
    rows: list[dict] = []
    for place, row in read_rows(file):
        try:
            if not isinstance(row, dict) or len(row) < 2 or (rows and list(row) != list(rows[0])):
                raise ValueError(f"{row!r} is not a row of at least two columns, the same in all lines")
            if not all(checked_text(text, name, is_strict=True).strip() for name, text in row.items()):
                raise ValueError(
                    f"{row!r} has an empty text, which is neither a positive nor a negative; remove this line"
                )
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        rows.append(row)
    if not rows:
        raise ValueError(f"{file} is empty; give at least one row")
    names = _names(len(rows[0]))
    return Dataset.from_list([dict(zip(names, row.values())) for row in rows])


def read_sets_of_pairs(files: Iterable[str | Path]) -> dict[str, Dataset]:
    """Return `read_pairs` of each file by its name without suffix.

    Raises:
        ValueError: Two files have one name, or as of `read_pairs`.
    """
    sets: dict[str, Dataset] = {}
    for file in files:
        if (name := Path(file).stem) in sets:
            raise ValueError(f"two files have the name {name}, which identifies the set; rename one of them")
        sets[name] = read_pairs(file)
    return sets


def hold_out(sets: Mapping[str, Dataset], share: float, seed: int) -> tuple[DatasetDict, DatasetDict]:
    """Divide each set at random into rows to train on and rows to evaluate on.

    Args:
        sets: Sets by name.
        share: Share of the rows to evaluate on, at most `MOST_HELD_OUT` rows of a set. A single row is not held out, since a
            ranking of one document says nothing.
        seed: Seed of the choice.

    Returns:
        The sets to train on, and the held-out rows of those sets that have some.
    """
    training, held_out = DatasetDict(sets), DatasetDict()
    for name, rows in sets.items():
        if (number := min(int(share * len(rows)), MOST_HELD_OUT)) > 1:
            parts = rows.train_test_split(number, seed=seed)
            training[name], held_out[name] = parts["train"], parts["test"]
    return training, held_out
