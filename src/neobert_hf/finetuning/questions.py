"""Questions on texts, with answers that are parts of the text or without an answer: SQuAD's nested JSON, and flat rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, List, Value

from ..files.rows import Faults, read_rows
from .labelled import LabelledDataArguments, MissingColumn, Row, check_filled, column, read_splits

FEATURES = {
    "id": Value("string"),
    "question": Value("string"),
    "context": Value("string"),
    "answers": {"text": List(Value("string")), "answer_start": List(Value("int64"))},
}


def read_questions(arguments: LabelledDataArguments, seed: int) -> DatasetDict:
    """Read questions and the texts that hold their answers.

    A file is SQuAD's own JSON (`data`, `paragraphs`, `qas`), or it has a row for each question with the columns of
    `rajpurkar/squad_v2`: `question`, `context`, `answers` with the lists `text` and `answer_start`, and perhaps `id`. A question
    without an answer has empty lists or a true `is_impossible`.

    Args:
        arguments: Where the rows are.
        seed: Seed of the choice of validation rows, if no others are given.

    Returns:
        `train` and `validation` if there are training rows, and `test` if it was given, with these columns. The answers of a
        test file may be absent. Without validation rows, a tenth of the texts is held out with all of their questions.

    Raises:
        ValueError: Rows have faults, such as an answer that is not at its place in the text; the message names files and lines.
            Or all training rows have one text, and there are no validation rows.
        OSError: A file cannot be read.
    """
    splits, _ = read_splits(arguments, _check, ["answers", "is_impossible"], seed, _read)
    if "train" in splits and "validation" not in splits:
        splits = _with_validation(splits, arguments.train_file or arguments.dataset_name, seed)
    return DatasetDict({name: _dataset(rows) for name, rows in splits.items()})


def _read(file: str, faults: Faults) -> Iterator[tuple[str, Any]]:
    for place, row in read_rows(file, faults=faults):
        if isinstance(row, dict) and "data" in row:
            yield from _questions(file, row["data"])
        else:
            yield place, row


def _questions(file: str, titles: Any) -> Iterator[tuple[str, dict]]:
    """The questions of SQuAD's nested JSON as flat rows."""
    try:
        for title, entry in enumerate(titles, 1):
            for paragraph, part in enumerate(entry["paragraphs"], 1):
                for number, row in enumerate(part["qas"], 1):
                    place = f"{file}, title {title}, paragraph {paragraph}, question {number}"
                    yield place, {"context": part["context"], **row}
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{file} has data that is not as in SQuAD ({type(error).__name__}: {error}); write data, a list of titles with "
            "paragraphs, each with a context and qas"
        ) from error


def _check(row: dict, has_labels: bool) -> dict:
    texts = {name: column(row, name) for name in ("question", "context")}
    check_filled(texts)
    answers = _answers(row, texts["context"]) if has_labels else None
    return {"id": str(row["id"]) if row.get("id") is not None else None, **texts, "answers": answers}


def _answers(row: dict, context: str) -> dict[str, list]:
    """The answers of a row, without white space around them."""
    answers, is_impossible = row.get("answers"), row.get("is_impossible")
    if answers is None and not is_impossible:
        kind = ValueError if {"answers", "is_impossible"} & {*row} else MissingColumn
        raise kind("'answers' is missing; a question without an answer has empty lists, or a true is_impossible")
    texts, starts = _lists(answers or {})
    if is_impossible and texts:
        raise ValueError(f"the question is_impossible and has the answer {texts[0]!r:.80}; remove one of them")
    for text, start in zip(texts, starts):
        check_filled({"answers": text})
        if type(start) is not int or start < 0 or context[start : start + len(text)] != text:
            found = context.find(text)
            hint = f"it is at {found}" if found >= 0 else "it is nowhere in it"
            raise ValueError(
                f"the answer {text!r:.80} is not at character {start} of the context, the answer_start; {hint}"
            )
    starts = [start + len(text) - len(text.lstrip()) for text, start in zip(texts, starts)]
    return {"text": [text.strip() for text in texts], "answer_start": starts}


def _lists(answers: Any) -> tuple[list, list]:
    """Texts and starts, from a dict of two lists, from a list of answers, or from one answer."""
    answers = [answers] if isinstance(answers, dict) and isinstance(answers.get("text"), str) else answers
    try:
        if isinstance(answers, dict):
            texts, starts = (answers[name] for name in ("text", "answer_start")) if answers else ([], [])
        else:
            texts, starts = ([answer[name] for answer in answers] for name in ("text", "answer_start"))
        if len(texts) == len(starts) and not isinstance(texts, str):
            return list(texts), list(starts)
    except (KeyError, TypeError):
        pass
    raise ValueError(f"'answers' is {answers!r:.80}; write the lists text and answer_start, of the same length")


def _with_validation(splits: dict[str, list[Row]], source: str, seed: int) -> dict[str, list[Row]]:
    """Hold out a tenth of the texts: a model has seen the text of a question whose neighbours it was trained on."""
    rows = splits["train"]
    contexts = list(dict.fromkeys(row.values["context"] for row in rows))
    if len(contexts) < 2:
        raise ValueError(
            f"{source}: all questions have the same context, so none can be held out; give --validation_file"
        )
    chosen = np.random.default_rng(seed).permutation(len(contexts))[: max(1, len(contexts) // 10)]
    held_out = {contexts[i] for i in chosen}
    parts = {"train": False, "validation": True}
    return splits | {
        name: [row for row in rows if (row.values["context"] in held_out) is part] for name, part in parts.items()
    }


def _dataset(rows: Iterable[Row]) -> Dataset:
    values = [{**row.values, "id": row.values["id"] or row.place} for row in rows]
    if values[0]["answers"] is not None:
        return Dataset.from_list(values, features=Features(FEATURES))
    unlabelled = {name: feature for name, feature in FEATURES.items() if name != "answers"}
    return Dataset.from_list(
        [{name: row[name] for name in unlabelled} for row in values], features=Features(unlabelled)
    )
