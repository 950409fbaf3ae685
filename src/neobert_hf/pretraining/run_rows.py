"""From text to the rows of a run: tokenized documents or a stream, held-out documents, packed rows."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedTokenizerBase

from .arguments import CorpusArguments, PretrainingArguments
from .corpus import open_corpus
from .documents import MANIFEST, Documents, Selection
from .packing import MixedRows, PackedRows, PackedStream, RatedRows
from .plans import PLANS, PackingPlan, PackingSettings, make_packing_plan, write_packing_plan
from .tokenizing import tokenize


@dataclass(frozen=True)
class RunRows:
    """The text of a run: the rows that it trains on, those that it is evaluated on, and what identifies both.

    Args:
        data: Text, and the folder of its tokens.
        training: Recipe and training arguments.
        text: Documents to train on, or a stream of rows.
        held_out: Held-out documents, or None.
        source: Values that identify the text.
    """

    data: CorpusArguments
    training: PretrainingArguments
    text: Documents | Selection | PackedStream
    held_out: Subset | None
    source: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the rows of each step beside recipe and seed, in plain types."""
        files = [Path(file).name for file in self.data.validation_files or ()]
        held_out = {"files": files, "num_held_out": self.data.num_held_out}
        return {"data": self.source, "held_out": held_out, **order_of_rows(self.data, self.training)}

    def pack(self) -> tuple[Dataset, PackedRows | None]:
        """Return the rows of the whole run, and one pass over the held-out documents, packed in the same way.

        Packing plans are made once and kept beside the documents.

        Raises:
            ValueError: The mixture draws from documents of a length that no document has, or a plan is damaged.
            OSError: A plan cannot be written.
        """
        rows = self.text
        if not self.data.streaming:
            rows = self._documents()
        if self.held_out is None:
            return rows, None
        training, held_out = self.training, self.held_out
        settings = PackingSettings(
            training.row_tokens,
            training.max_length,
            self.data.long_documents,
            held_out.dataset.special_tokens,
            seed=training.seed,
        )
        lengths = np.array([len(held_out[number]) for number in range(len(held_out))])
        return rows, PackedRows(held_out, make_packing_plan(lengths, settings))

    def _documents(self) -> Dataset:
        """The rows of the whole run from documents by number."""
        training = self.training
        num_rows = training.max_steps * training.rows_per_step
        parts = []
        for share, length in zip(training.mixture, (0, *training.longer_than)):
            part = None
            if share:
                part = PackedRows(self.text, self._plan(length), num_rows)
            parts.append(part)
        rows = parts[0]
        if training.mixture[0] != 1.0:
            rows = MixedRows(parts, training.mixture, training.rows_per_step, training.max_steps, training.seed)
        rate = _mask_rate(training)
        if rate is not None:
            rows = RatedRows(rows, rate)
        return rows

    def _plan(self, length: int) -> PackingPlan:
        """The plan of documents of more than `length` tokens."""
        training, documents = self.training, self.text
        if length:
            documents = documents.longer_than(length)
        return write_packing_plan(
            documents,
            training.row_tokens,
            training.max_length,
            fallback_folder=Path(training.output_dir, PLANS),
            show_progress=not training.disable_tqdm,
            long_documents=self.data.long_documents,
            seed=training.seed,
        )


def open_text(data: CorpusArguments, training: PretrainingArguments, tokenizer: PreTrainedTokenizerBase) -> RunRows:
    """Open the training text and the held-out text of a run; what is not tokenized yet is tokenized first.

    Args:
        data: Text, and the folder of its tokens.
        training: Recipe and training arguments.
        tokenizer: A fast tokenizer.

    Returns:
        The text, which gives the rows.

    Raises:
        ValueError: Another tokenizer made the documents, several processes would tokenize at once, or the text is wrong.
        OSError: A file cannot be read or written.
    """
    folder = Path(data.documents_dir or Path(training.output_dir, "documents"))
    held_out = None
    if data.validation_files:
        beside = folder.with_name(f"{folder.name}-held_out")
        documents = _open_documents(data, training, tokenizer, data.validation_files, beside)
        held_out = Subset(documents, range(len(documents)))
    if data.streaming:
        text, source = open_stream(data, training, tokenizer)
        return RunRows(data, training, text, held_out, source)
    text = _open_documents(data, training, tokenizer, data.train_files, folder)
    names = ("source", "num_documents", "num_tokens", "num_tasks", "tokenizer")
    source = {name: text.manifest[name] for name in names}
    if held_out is None:
        text, held_out = text.split(data.num_held_out, training.seed)
    return RunRows(data, training, text, held_out, source)


def _open_documents(data, training, tokenizer, files, folder):
    is_finished = (folder / MANIFEST).is_file()
    if not is_finished and training.world_size > 1:
        raise ValueError(
            f"{folder} holds no tokenized text; tokenize before you start several processes: neobert tokenize --help"
        )
    # The comparison of finished text with its files reads them once: one process of each machine does it.
    is_compared = (files or data.dataset_name) and training.local_process_index == 0
    if not is_finished or is_compared:
        tokenize(open_corpus(data, training.to_recipe(), files), tokenizer, folder, workers=data.num_processes)
    documents = Documents(folder)
    documents.check_tokenizer(tokenizer)
    return documents


def open_stream(
    data: CorpusArguments, training: PretrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[PackedStream, dict]:
    """Open the text as an endless stream that is tokenized during training; return its rows and what identifies the text.

    Raises:
        ValueError: The recipe draws documents by length, or there are more workers than files.
    """
    if training.mixture[0] != 1.0:
        raise ValueError(
            f"mixture={training.mixture} requires the lengths of all documents, unknown in a stream; leave streaming out"
        )
    corpus = open_corpus(data, training.to_recipe(), data.train_files)
    stream = corpus.stream()
    if training.dataloader_num_workers > stream.num_shards:  # a worker without a file would yield no rows
        raise ValueError(
            f"dataloader_num_workers={training.dataloader_num_workers} is above num_shards={stream.num_shards}, the files of the "
            f"stream, and each worker reads files of its own; give dataloader_num_workers {stream.num_shards} or more files"
        )
    # Not lambdas, which cannot be sent to the processes of a DataLoader.
    encode = partial(tokenizer, truncation=True, max_length=training.max_length)
    tokens = stream.map(encode, input_columns=corpus.text_column).select_columns("input_ids")
    tokens = tokens.filter(partial(_has_text, tokenizer.num_special_tokens_to_add()), input_columns="input_ids")
    num_rows = training.max_steps * training.rows_per_step  # a run that resumes after its last step has no row left
    rows = PackedStream(
        tokens.repeat(None),
        training.row_tokens,
        seed=training.seed,
        num_rows=num_rows,
        mask_rate=_mask_rate(training),
    )
    return rows, corpus.source


def _mask_rate(training):
    """A function from the number of a row to its mask rate; None if the rate is constant."""
    recipe = training.to_recipe()
    if len(recipe.mask_rate) == 1:
        return None
    return partial(_rate_of_row, recipe, training.rows_per_step)


def _rate_of_row(recipe, rows_per_step, number):
    return recipe.mask_rate_at(number // rows_per_step)


def _has_text(num_special_tokens, ids):
    return len(ids) > num_special_tokens


def order_of_rows(data: CorpusArguments, training: PretrainingArguments) -> dict:
    """Return what decides the rows of each step beside text, recipe and seed; a resume and an ablation compare it.

    Args:
        data: Text and its tokens.
        training: Recipe and training arguments.

    Returns:
        Values of arguments by name.
    """
    order = {"row_tokens": training.row_tokens}
    if not data.streaming:
        return order | {"long_documents": data.long_documents}
    if training.dataloader_num_workers:  # each packs documents of its own, and gives whole batches in turn
        order["dataloader_num_workers"] = training.dataloader_num_workers
        order["per_device_train_batch_size"] = training.per_device_train_batch_size
    return order
