"""`predict_file`: what a saved or an exported model says of the rows of a file. An export needs no torch and no transformers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..data.lengths import Truncation
from ..files.messages import say
from ..finetuning.predictions import check_predictions_file, write_predictions
from ..finetuning.questions import read_questions
from ..finetuning.rows import LabelledRows
from ..finetuning.scores import label_columns, scores_of
from ..finetuning.texts import read_labelled_texts
from ..finetuning.words import read_tagged_words
from .predictor import Predictor, open_folder

# Arguments of the readers that belong to a training
NO_TRAINING = dict.fromkeys(
    ("train_file", "validation_file", "dataset_name", "dataset_config", "max_train_rows", "label_columns", "tag_column")
) | {"has_training": False, "label_column": "label"}


def predict_file(
    model: str | Path,
    file: str | Path,
    output: str | Path | None = None,
    text_columns: Iterable[str] = ("text",),
    word_column: str | None = None,
    column_names: list[str] | None = None,
    label_separator: str | None = None,
    truncation: Truncation = "warn",
    skip_bad_rows: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> None:
    """Predict the rows of a file by a saved or an exported model: classes, numbers, tags, answers, or scores of pairs.

    The output has the columns of the file, and those that `--test_file` of a training adds. A row without a text has an empty
    prediction. Labels in the file are not read.

    Args:
        model: Folder that a training saved, or that `export_model` wrote.
        file: Rows, as of `read_rows`; for tags also CoNLL, for answers also SQuAD's JSON.
        output: File with the suffix .csv, .jsonl or .parquet; None takes predictions.csv in the current folder, or
            predictions.jsonl if a row has a list.
        text_columns: One or two columns of text, for classes, numbers and scores.
        word_column: Column of the words, for tags, as of `TaggedWordArguments`.
        column_names: All columns of CSV or TSV without a line of names.
        label_separator: What joins the classes of a row, if it has several; None writes lists.
        truncation: What becomes of texts that are longer than the model reads.
        skip_bad_rows: Leave out rows with a fault, and say how many.
        overwrite: Replace the output.
        options: Further arguments of `open_folder`.

    Raises:
        ValueError: The model predicts nothing of rows, a row has a fault, or as of `open_folder`.
        FileExistsError: The output exists, or is an input.
        OSError: A file cannot be read or written.
    """
    for each in [output] if output else ["predictions.csv", "predictions.jsonl"]:
        check_predictions_file(Path(each), overwrite, [file])
    predictor = open_folder(model, **options)
    arguments = SimpleNamespace(
        **NO_TRAINING,
        test_file=str(file),
        text_columns=list(text_columns),
        word_column=word_column,
        column_names=column_names,
        label_separator=label_separator,
        skip_bad_rows=skip_bad_rows,
        problem_type=predictor.saved.problem_type,
    )
    rows = _read(predictor, arguments)
    *inputs, _ = rows.test or ()
    columns = _columns(predictor, inputs, label_separator, truncation)
    answered = [rows.test_rows[place] for place in rows.test_places]
    found = rows.with_empty([row | of_row for row, of_row in zip(answered, columns)])
    write_predictions(output, found, overwrite=overwrite)


def _read(predictor: Predictor, arguments: Any) -> LabelledRows:
    saved = predictor.saved
    trained = SimpleNamespace(classes_=saved.labels, problem_type=saved.problem_type)
    if saved.kind in ("classes", "score"):
        return read_labelled_texts(arguments, 0, trained)
    if saved.kind == "tags":
        return read_tagged_words(arguments, 0, trained)
    if saved.kind == "spans":
        return read_questions(arguments, 0)
    raise ValueError(
        f"{saved.source} holds an embedding model, which predicts nothing of rows; `neobert embed` writes vectors"
    )


def _columns(predictor: Predictor, inputs: list, separator: str | None, truncation: Truncation) -> Iterable[dict]:
    """What the model adds to each row."""
    saved = predictor.saved
    if saved.kind == "tags":
        return predictor.tags(*inputs)
    if saved.kind == "spans":
        return predictor.answers(list(zip(*inputs)))
    texts, fact, _ = predictor.prepare(inputs[0], truncation)
    if fact:
        say(f"{fact}; split long texts")
    logits = predictor.logits(texts)
    if saved.kind == "score":
        return label_columns(scores_of(logits, saved.score_type), saved.labels, "regression")
    return label_columns(logits, saved.labels, saved.score_type, separator)
