"""Embeddings of the texts of files, written to a file: `embed_files`."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from tqdm.auto import tqdm

from ..files.rows import SUFFIXES, read_text_column
from ..files.texts import check_leaves_tokens, check_max_length
from ..files.wordpiece import plain_tokenizer
from ..files.writing import write_error, writing
from ..model.machine_neobert import best_dtype
from ..runs import MINI_MODEL_PATH
from .kept import BLOCK, Kept
from .memory import check_memory
from .models import fingerprint, open_embedding_model
from .passages import find_files

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Blocks = Iterator[tuple[list[str], np.ndarray]]  # texts with their vectors (texts, dimension)


def embed_files(
    files: Sequence[str],
    output: str,
    model: str = MINI_MODEL_PATH,
    text_column: str = "text",
    prompt_name: str | None = None,
    normalize: bool = False,
    max_length: int | None = None,
    batch_size: int = 64,
) -> dict:
    """Embed the texts of files, and write the embeddings to a file.

    The vectors are kept in the file OUTPUT.vectors until the output is complete, so a call after an interruption embeds only
    what is missing.

    Args:
        files: Files, folders, and patterns such as `data/*.csv`. Texts are in .txt (a text in each line), .jsonl, .json, .csv,
            .tsv or .parquet.
        output: File to write: .npy holds the embeddings (texts, dimension) in float32; .jsonl and .parquet hold the columns text
            and embedding.
        model: Embedding model, as a folder or a Hub id.
        text_column: Column of the texts; .txt has no columns.
        prompt_name: Name of the model's prompt to put before each text.
        normalize: Scale each embedding to length 1.
        max_length: Length in tokens at which a text is truncated; by default what the model reads.
        batch_size: Number of texts in a batch of the model.

    Returns:
        The output, the number of files that were read and that were skipped in folders, the number of texts, their dimension,
        the length in tokens that the model reads, and how many texts are longer (None if the tokenizer is not a fast one).

    Raises:
        ValueError: The output has another ending, is an input, or is a folder; a text is not valid; the model cannot be opened;
            or the work needs more memory than is free.
        OSError: A file cannot be read, or the output cannot be written.
        RuntimeError: The vectors cannot be kept.
    """
    suffixes = (".txt", *SUFFIXES)
    named, skipped = find_files(files, suffixes)
    found = list(named)
    if not found:
        raise ValueError(f"{', '.join(files)}: no file ends in {', '.join(suffixes)}; choose files of texts")
    _check_output(Path(output), found)
    check_memory(sum(file.stat().st_size for file in found), f"reading {', '.join(files)}", "split the file")
    texts = [text for _, text in read_text_column(found, text_column)]
    encoder = open_for_inference(model)
    set_max_length(encoder, max_length)
    check_memory(
        _needed_bytes(encoder, batch_size),
        f"embedding {len(texts):,} texts, {batch_size} at once",
        "choose a smaller batch size, or split the file",
    )
    options = {"prompt_name": prompt_name, "normalize_embeddings": normalize}
    encode = partial(encoder.encode, batch_size=batch_size, show_progress_bar=False, **options)
    kept = Kept(Path(f"{output}.vectors"))
    vectors = partial(kept.vectors, encode=encode, identity=f"{fingerprint(encoder, {})} {options}")
    blocks = [texts[start : start + BLOCK] for start in range(0, len(texts), BLOCK)]
    with closing(kept):
        num_done = 0
        with tqdm(total=len(texts), unit="text", disable=None) as bar:
            try:
                for block in blocks:
                    dimension = vectors(block).shape[1]
                    num_done += len(block)
                    bar.update(len(block))
            except KeyboardInterrupt:
                done = f"{num_done:,} of {len(texts):,} texts are embedded"
                bar.write(f"interrupted: {done}; the same command continues", sys.stderr)
                raise
        with writing(Path(output)) as handle:
            embedded = ((block, vectors(block)) for block in blocks)
            WRITERS[Path(output).suffix](handle, embedded, (len(texts), dimension))
    kept.delete()
    prompt = encoder.prompts.get(prompt_name or encoder.default_prompt_name, "")
    return {
        "output": output,
        "files": len(found),
        "skipped_files": skipped.total(),
        "texts": len(texts),
        "dimension": dimension,
        "max_seq_length": longest_input(encoder),
        "truncated": _num_truncated(encoder, (prompt + text for text in texts)),
    }


def _needed_bytes(encoder: SentenceTransformer, batch_size: int) -> int:
    """A lower bound: on a CPU the states of a feed-forward layer for a batch of maximum length."""
    config = getattr(encoder[0], "config", None)  # a StaticEmbedding has none
    if not hasattr(config, "hidden_size") or encoder.device.type != "cpu":
        return 0
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    width = 3 * config.hidden_size + inner
    return batch_size * (encoder.max_seq_length or 512) * width * encoder.dtype.itemsize


def set_max_length(encoder: SentenceTransformer, max_length: int | None) -> None:
    """Set the number of tokens at which a model truncates a text; None changes nothing.

    Raises:
        ValueError: The model has no positions for this length, or reads texts of any length.
    """
    if max_length is None:
        return
    check_leaves_tokens(max_length, "max_length")
    if longest_input(encoder) is None:
        raise ValueError(f"max_length={max_length}, but this model reads texts of any length; leave out max_length")
    check_max_length(encoder[0].model, max_length, "max_length")
    encoder.max_seq_length = max_length


def longest_input(model: SentenceTransformer) -> int | None:
    """The number of tokens at which a model truncates a text; None if it reads all of them."""
    longest = model.max_seq_length
    return None if longest is None or math.isinf(longest) else int(longest)


def _num_truncated(model: SentenceTransformer, inputs: Iterable[str]) -> int | None:
    """The number of inputs that are longer than `longest_input`; None if the tokenizer is not a fast one."""
    longest = longest_input(model)
    if longest is None:
        return 0
    if not getattr(model.tokenizer, "is_fast", False):
        return None
    tokenizer = plain_tokenizer(model.tokenizer)
    candidates = [text for text in inputs if len(text.encode()) > longest - 2]  # a token has at least a byte
    parts = (candidates[i : i + 1024] for i in range(0, len(candidates), 1024))
    return sum(len(tokens) > longest for part in parts for tokens in tokenizer.encode_batch_fast(part))


def open_for_inference(model: str) -> SentenceTransformer:
    """Open an embedding model in the dtype of its config; bf16 weights in the dtype that is fastest on this machine.

    Raises:
        ValueError: The model cannot be opened.
    """
    from sentence_transformers.util import get_device_name

    if model == MINI_MODEL_PATH:  # stored in bf16, although its config declares float32
        return open_embedding_model(model, model_kwargs={"dtype": best_dtype(get_device_name())})
    try:
        encoder = open_embedding_model(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"model={model} cannot be opened ({error}); give an existing folder or a Hub id") from error
    return encoder.to(best_dtype(encoder.device)) if encoder.dtype == torch.bfloat16 else encoder


def _check_output(output: Path, files: Sequence[Path]) -> None:
    """Raise an error before the work if the output cannot be written."""
    if output.suffix not in WRITERS:
        raise ValueError(f"output={output} ends in none of {', '.join(WRITERS)}; choose one of them")
    if output.exists() and any(output.samefile(file) for file in files if file.exists()):
        raise ValueError(f"output={output} is also an input, whose other columns would be lost; name another file")
    if output.is_dir():
        raise ValueError(f"output={output} is a folder; name a file")
    try:
        with tempfile.TemporaryFile(dir=output.parent) as handle:
            handle.write(b"0" * 4096)
    except OSError as error:
        raise write_error(error, output, "no text was embedded") from error


def _write_npy(handle: BinaryIO, blocks: Blocks, shape: tuple[int, int]) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(handle, header)
    handle.writelines(np.ascontiguousarray(vectors, "<f4").data for _, vectors in blocks)


def _write_jsonl(handle: BinaryIO, blocks: Blocks, shape: tuple[int, int]) -> None:
    for texts, vectors in blocks:
        rows = ({"text": text, "embedding": vector.tolist()} for text, vector in zip(texts, vectors))
        handle.writelines(f"{json.dumps(row)}\n".encode() for row in rows)


def _write_parquet(handle: BinaryIO, blocks: Blocks, shape: tuple[int, int]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"text": pa.string(), "embedding": pa.list_(pa.float32(), shape[1])})
    with pq.ParquetWriter(handle, schema) as writer:
        for texts, vectors in blocks:
            embeddings = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), shape[1])
            writer.write_table(pa.table([pa.array(texts, pa.string()), embeddings], schema=schema))


WRITERS = {".npy": _write_npy, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
