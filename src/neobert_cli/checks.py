"""What costs nothing is checked before torch is imported, which takes seconds: files, columns, folders, names of models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import neobert_hf
from neobert_hf.checkpoints.trust import check_source, resolve
from neobert_hf.data.finding import find_files
from neobert_hf.files.output import check_folder

INPUTS = ("files", "train_file", "train_files", "validation_file", "validation_files", "test_file")
MODELS = ("model", "model_name_or_path", "embedding_model", "init_from", "source", "base")
OF_RUN = ("run.json", "_lock")  # files by which a training knows its folder
CLASSIFIER = "finetune-classifier"
TABLES = (CLASSIFIER, "finetune-qa", "train-contrastive", "train-reranker")
Values = dict[str, list[str]]  # of the options of a command line, by name


def values_of(words: Iterable[str]) -> Values:
    """Return the values of the options of a command line."""
    values: Values = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            option, _, value = word[2:].partition("=")
            name = option.replace("-", "_")
            values[name] = [value] if value else []
        else:
            values.setdefault(name, []).append(word)
    return values


def prepare(command: str, values: Values) -> None:
    """Refuse what a command would refuse later; then import torch, and register the model.

    Raises:
        ValueError: A value is wrong, or a table lacks a column.
        OSError: A file is missing, a folder holds files of somebody else, or the Hub has no such model.
    """
    for model in _given(values, *MODELS):
        resolve(model)
    for source in _given(values, "tokenizer_name"):
        check_source(source)
    find_files(_given(values, *INPUTS), lambda file: False)
    if command in TABLES:
        _check_tables(command, values)
    for folder in _given(values, "resume_from_checkpoint"):
        if folder not in ("auto", "last") and not Path(folder).is_dir():
            raise ValueError(f"resume_from_checkpoint={folder} is no folder; give auto, last, or that of a checkpoint")
    if _given(values, "train_file", "train_files", "dataset_name"):
        for folder in _given(values, "output_dir"):
            check_folder(Path(folder), *OF_RUN)
    neobert_hf.register()


def _given(values: Values, *names: str) -> list[str]:
    return [value for name in names for value in values.get(name, ())]


def _check_tables(command: str, values: Values) -> None:
    """Compare the columns of tables with the options; the first row of JSON may lack one that others have."""
    from neobert_hf.data.rows import check_columns, read_rows, suffix_of

    texts = values.get("text_columns", ["text"])
    labels = values.get("label_columns") or values.get("label_column", ["label"])
    for name in INPUTS:
        wanted = texts if name == "test_file" else texts + labels
        for file in values.get(name, ()):
            if suffix_of(Path(file)) in (".json", ".jsonl"):
                continue
            row = next(read_rows(file, column_names=values.get("column_names"), is_strict=False), None)
            if row and row.values and command == CLASSIFIER:
                check_columns(row.place, row.values, [(column,) for column in wanted])
