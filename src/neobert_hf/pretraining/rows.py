"""From text to the rows of a run: tokenized documents or a stream, held-out documents, packed rows."""

from functools import partial
from pathlib import Path

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..data.corpus import Corpus
from ..data.packing import MixedRows, PackedRows, PackedStream
from ..data.plans import PLANS, NothingToPack, write_packing_plan
from ..data.shard_reader import Shards, ShardsSubset, ShardsView
from ..data.shards import MANIFEST, tokenize_corpus
from .arguments import CorpusArguments, PretrainingArguments


def open_text(
    data: CorpusArguments, training: PretrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[Shards | ShardsSubset | PackedStream, Shards | ShardsView | None, dict]:
    """Open the training text and the held-out text.

    Returns:
        The documents to train on, or a stream of rows; the held-out documents, or None; and the values that identify the text.
    """
    folder = Path(data.shards_dir or Path(training.output_dir, "shards"))
    held_out = None
    if data.validation_files:
        beside = folder.with_name(f"{folder.name}-held_out")
        held_out = open_documents(data, training, tokenizer, data.validation_files, beside)
    if data.streaming:
        stream, source = open_stream(data, training, tokenizer)
        return stream, held_out, source
    documents = open_documents(data, training, tokenizer, data.train_files, folder)
    source = {name: documents.manifest[name] for name in ("source", "num_documents", "num_tokens", "tokenizer")}
    if held_out is None:
        documents, held_out = documents.split(data.num_held_out, training.seed)
    return documents, held_out, source


def open_corpus(data: CorpusArguments, training: PretrainingArguments, files: list[str] | None) -> Corpus:
    """Open the text of the files; without files, of the named dataset; without a name, of the recipe's dataset."""
    recipe = training.to_recipe()
    name = None if files else data.dataset_name or recipe.corpus
    column = data.text_column or (recipe.text_column if name == recipe.corpus else "text")
    return Corpus(files, name, data.dataset_config, text_column=column, sample_by=data.sample_by)


def open_documents(
    data: CorpusArguments,
    training: PretrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    files: list[str] | None,
    folder: Path,
) -> Shards:
    """Open the tokenized text in a folder, or tokenize into it.

    Raises:
        ValueError: The folder holds other text or tokens of another tokenizer, or it is empty and several processes train.
    """
    is_finished = (folder / MANIFEST).is_file()
    if not is_finished and training.world_size > 1:
        raise ValueError(
            f"{folder} holds no tokenized text; tokenize before you start several processes: neobert tokenize --help"
        )
    # The comparison of finished text with its files reads them once: one process of each machine does it.
    is_compared = (files or data.dataset_name) and training.local_process_index == 0
    if not is_finished or is_compared:
        corpus = open_corpus(data, training, files)
        max_length = training.max_length if data.long_documents == "chunk" else max(training.max_length, 4096)
        options = dict(long_documents=data.long_documents, num_processes=data.num_processes)
        tokenize_corpus(corpus, tokenizer, folder, corpus.source, max_length=max_length, **options)
    documents = Shards(folder, verify=data.verify_shards and training.process_index == 0)
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
            f"mixture={training.mixture} requires the lengths of all documents, unknown in a stream; leave --streaming out"
        )
    corpus = open_corpus(data, training, data.train_files)
    stream = corpus.stream()
    if training.dataloader_num_workers > stream.num_shards:  # a worker without a file would yield no rows
        raise ValueError(
            f"dataloader_num_workers={training.dataloader_num_workers} is above num_shards={stream.num_shards}, the files of the "
            f"stream, and each worker reads files of its own; give --dataloader_num_workers {stream.num_shards} or more files"
        )
    # Not lambdas, which cannot be sent to the processes of a DataLoader.
    tokenize = partial(tokenizer, truncation=True, max_length=training.max_length)
    tokens = stream.map(tokenize, input_columns=corpus.text_column).select_columns("input_ids")
    tokens = tokens.filter(partial(_has_text, tokenizer.num_special_tokens_to_add()), input_columns="input_ids")
    num_rows = training.max_steps * training.rows_per_step  # a run that resumes after its last step has no row left
    return PackedStream(tokens.repeat(None), training.row_tokens, seed=training.seed, num_rows=num_rows), corpus.source


def _has_text(num_special_tokens, ids):
    return len(ids) > num_special_tokens


def training_rows(
    documents: Shards | ShardsSubset, training: PretrainingArguments, end_token: int | None, verify: bool = False
) -> Dataset:
    """Return the rows of a whole run, by packing plans that are made once and kept beside the documents.

    Args:
        documents: Documents to train on.
        training: Sizes, mixture and seed. Where nothing can be written beside the documents, its output folder holds the plans.
        end_token: As for `PackedRows`.
        verify: Compare the checksums of plans that exist.

    Raises:
        ValueError: The mixture draws from documents of a length that no document has, or a plan is damaged.
        OSError: A plan cannot be written.
    """
    parts, num_rows = [], training.max_steps * training.rows_per_step
    options = dict(max_length=training.max_length, seed=training.seed, verify=verify)
    options |= dict(show_progress=not training.disable_tqdm, spare_folder=Path(training.output_dir, PLANS))
    for share, length in zip(training.mixture, (0, *training.longer_than)):
        if not share:
            parts.append(None)
            continue
        try:
            plan = write_packing_plan(
                documents.longer_than(length) if length else documents, training.row_tokens, **options
            )
        except NothingToPack as error:
            raise ValueError(
                f"mixture={training.mixture} draws {share:.0%} of the steps from documents of more than {length} tokens, and "
                "there are none; change mixture or longer_than"
            ) from error
        parts.append(PackedRows.from_plan(documents.shards, plan, end_token, num_rows))
    if training.mixture[0] == 1.0:
        return parts[0]
    return MixedRows(parts, training.mixture, training.rows_per_step, training.max_steps, training.seed)


def held_out_rows(documents: Shards | ShardsView, training: PretrainingArguments, end_token: int | None) -> PackedRows:
    """Return one pass over the held-out documents, packed as those of the training."""
    options = dict(max_length=training.max_length, end_token=end_token, seed=training.seed)
    return PackedRows(documents, documents.lengths, training.row_tokens, **options)
