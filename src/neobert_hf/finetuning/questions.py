"""Questions on texts, with answers that are parts of the text or without an answer: SQuAD's nested JSON, and flat rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.rows import Row, read_rows
from .rows import (
    Columns,
    LabelledRows,
    Missing,
    as_lists,
    column,
    filled,
    move_to_validation,
    read_splits,
)

if TYPE_CHECKING:
    from .arguments import LabelledDataArguments

TEXTS = [("question",), ("context",)]
ANSWERS = [("answers", "is_impossible")]
REMEDY = "rename the column of it; a question without an answer has empty lists, or a true is_impossible"


def read_questions(arguments: LabelledDataArguments, seed: int) -> LabelledRows:
    """Read questions and the texts that hold their answers.

    A file is SQuAD's own JSON (`data`, `paragraphs`, `qas`), or it has a row for each question with the columns of
    `rajpurkar/squad_v2`: `question`, `context`, `answers` with the lists `text` and `answer_start`, and perhaps `id`. A question
    without an answer has empty lists or a true `is_impossible`.

    Args:
        arguments: Where the rows are.
        seed: Seed of the choice of validation rows, if no others are given.

    Returns:
        Rows as (questions, contexts, answers). Without validation rows, a tenth of the texts is held out with all of their
        questions. The test rows are `id`, by default the place in the file, and `question`.

    Raises:
        ValueError: Rows of training or validation have faults, such as an answer that is not at its place in the text; the
            message names files and lines. Or all training rows have one text, and there are no validation rows.
        OSError: A file cannot be read.
    """
    splits, _ = read_splits(arguments, Columns(TEXTS, ANSWERS, REMEDY, checked_question, _answers), seed, _read)
    if "train" in splits and "validation" not in splits:
        rows = splits["train"]
        contexts = list(dict.fromkeys(row.inputs[1] for row in rows if row.inputs))
        if len(contexts) < 2:
            source = arguments.train_file or arguments.dataset_name
            raise ValueError(f"{source}: all questions have the same context; give validation_file")
        # a model has seen the text of a question whose neighbours it was trained on
        chosen = np.random.default_rng(seed).permutation(len(contexts))[: max(1, len(contexts) // 10)]
        held_out = {contexts[i] for i in chosen}
        move_to_validation(splits, {i for i, row in enumerate(rows) if row.inputs and row.inputs[1] in held_out})
    for row in splits.get("test", []):
        number = row.values.get("id")
        if number in (None, ""):
            number = row.place
        row.values = {"id": str(number), "question": row.values.get("question")}
    return as_lists(arguments, splits)


def _read(file: str) -> Iterator[Row]:
    """Rows of a file; the questions of SQuAD's nested JSON as flat rows."""
    for row in read_rows(file, is_strict=False):
        if not (isinstance(row.values, dict) and "data" in row.values):
            yield row
            continue
        try:
            yield from _nested(file, row.values["data"])
        except (KeyError, TypeError) as error:
            found = f"{file} has data that is not as in SQuAD ({type(error).__name__}: {error})"
            remedy = "write data, a list of titles with paragraphs, each with a context and qas"
            raise ValueError(f"{found}; {remedy}") from error


def _nested(file: str, data: list) -> Iterator[Row]:
    for title, entry in enumerate(data, 1):
        for paragraph, part in enumerate(entry["paragraphs"], 1):
            for number, question in enumerate(part["qas"], 1):
                place = f"{file}, title {title}, paragraph {paragraph}, question {number}"
                yield Row(place, {"context": part["context"], **question})


def checked_question(row: dict) -> list[str]:
    """Return the question and the context of a row; the errors are those of `filled`, for each of them."""
    return [text for name in ("question", "context") for text in filled({name: column(row, name)})]


def _answers(row: dict, inputs: list) -> dict[str, list]:
    answers = row.get("answers")
    if answers is None and not row.get("is_impossible"):
        raise Missing("'answers' is missing; a question without an answer has empty lists, or a true is_impossible")
    answers = checked_answers(answers or {}, inputs[1])
    if row.get("is_impossible") and answers["text"]:
        found = f"the question is_impossible and has the answer {answers['text'][0]!r:.80}"
        raise ValueError(f"{found}; remove one of them")
    return answers


def checked_answers(answers: Any, context: str) -> dict[str, list]:
    """Return the answers to a question as the lists `text` and `answer_start`, without white space around the texts.

    Args:
        answers: A dict of two lists, a list of dicts with one answer each, or one such dict; empty if there is no answer.
        context: The text that holds them.

    Raises:
        ValueError: An answer is not at its place in the context, or `answers` is another thing.
    """
    texts, starts = _lists(answers)
    for text, start in zip(texts, starts):
        filled({"answers": text})
        if type(start) is not int or start < 0 or context[start : start + len(text)] != text:
            found = context.find(text)
            hint = f"it is at {found}" if found >= 0 else "it is nowhere in it"
            raise ValueError(f"the answer {text!r:.80} is not at character {start}, its answer_start; {hint}")
    starts = [start + len(text) - len(text.lstrip()) for text, start in zip(texts, starts)]
    return {"text": [text.strip() for text in texts], "answer_start": starts}


def _lists(answers: Any) -> tuple[list, list]:
    """Texts and starts, from a dict of two lists, from a list of answers, or from one answer."""
    if isinstance(answers, dict) and isinstance(answers.get("text"), str):
        answers = [answers]
    try:
        if isinstance(answers, dict):
            lists = answers or {"text": [], "answer_start": []}
        else:
            lists = {name: [answer[name] for answer in answers] for name in ("text", "answer_start")}
        texts = list(lists["text"])
        starts = list(lists["answer_start"])
        if len(texts) == len(starts):
            return texts, [start.item() if isinstance(start, np.integer) else start for start in starts]
    except (KeyError, TypeError):
        pass
    raise ValueError(f"'answers' is {answers!r:.80}; write the lists text and answer_start, of the same length")
