"""What costs nothing is checked before torch is imported, which takes seconds: files, columns, folders, names of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from neobert_hf.checkpoints import MINI_MODEL_PATH
from neobert_hf.checkpoints.saved_model import read_object
from neobert_hf.checkpoints.trust import check_source, resolve
from neobert_hf.data.finding import find_files
from neobert_hf.data.lengths import DEFAULT_LENGTH, as_list, refuse_longer
from neobert_hf.files.output import check_folder

INPUTS = ("file", "files", "train_file", "train_files", "validation_file", "validation_files", "test_file")
MODELS = ("model", "model_name_or_path", "embedding_model", "init_from", "source", "base")
OF_RUN = ("run.json", "_lock")  # files by which a training knows its folder


def check(command: str, options: Mapping[str, Any]) -> None:
    """Refuse what a command would refuse later.

    Args:
        command: Name of the command.
        options: Values of its options by name, texts or lists of texts.

    Raises:
        ValueError: A value is wrong, or a table lacks a column.
        OSError: A file is missing, a folder holds files of somebody else, or the Hub has no such model.
    """

    def given(*names: str) -> list[str]:
        return [value for name in names for value in as_list(options.get(name))]

    for model in given(*MODELS):
        resolve(model)
    for source in given("tokenizer_name"):
        check_source(source)
    find_files(given(*INPUTS), lambda file: False)
    if command.startswith("finetune-"):
        _check_rows(command, options)
    for folder in given("resume_from_checkpoint"):
        if folder not in ("auto", "last") and not Path(folder).is_dir():
            raise ValueError(f"resume_from_checkpoint={folder} is no folder; give auto, last, or that of a checkpoint")
    if given("train_file", "train_files", "dataset_name"):
        for folder in given("output_dir"):
            check_folder(Path(folder), *OF_RUN)


def _check_rows(command: str, options: Mapping[str, Any]) -> None:
    """Check the options of the rows of a fine-tuning; of a classifier also their columns."""
    from neobert_hf.finetuning import arguments as kinds

    kind = {"finetune-classifier": kinds.LabelledTextArguments, "finetune-tagger": kinds.TaggedWordArguments}
    known = kind.get(command, kinds.LabelledDataArguments)
    data = known(**{field.name: options[field.name] for field in fields(known) if field.name in options})
    model = options.get("model_name_or_path", MINI_MODEL_PATH)
    longest = read_object(resolve(model) / "config.json").get("max_position_embeddings")
    if longest:
        refuse_longer(data.max_seq_length, max(longest, DEFAULT_LENGTH), model)
    if command == "finetune-classifier":
        labels = data.label_columns or [data.label_column]
        _check_tables([data.train_file, data.validation_file], data.text_columns + labels, data.column_names)
        _check_tables([data.test_file], data.text_columns, data.column_names)


def _check_tables(files: list[str | None], wanted: list[str], names: list[str] | None) -> None:
    """Compare the columns of tables with those that are wanted; the first row of JSON may lack one that others have."""
    from neobert_hf.data.rows import check_columns, read_rows, suffix_of

    for file in filter(None, files):
        if suffix_of(Path(file)) in (".json", ".jsonl"):
            continue
        row = next(read_rows(file, column_names=names, is_strict=False), None)
        if row and row.values:
            check_columns(row.place, row.values, [(name,) for name in wanted])
