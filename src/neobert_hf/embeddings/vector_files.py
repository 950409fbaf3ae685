"""Embeddings of the texts of files, written to a file: `embed_files`."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from ..data.files import write_error, writing
from ..data.rows import read_text_column
from ..data.wordpiece import plain_tokenizer
from ..model.machine_neobert import best_dtype
from ..runs import MINI_MODEL_PATH
from .memory import check_memory
from .models import open_embedding_model

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def embed_files(
    files: Sequence[str],
    output: str,
    model: str = MINI_MODEL_PATH,
    text_column: str = "text",
    prompt_name: str | None = None,
    normalize: bool = False,
    batch_size: int = 64,
) -> dict:
    """Embed the texts of files, and write the embeddings to a file.

    The file is written at the end, so an interrupted call keeps nothing: split files whose embedding takes long.

    Args:
        files: Files of one kind: .txt (a text in each line), .jsonl, .csv or .parquet.
        output: File to write: .npy holds the embeddings (texts, dimension); .jsonl and .parquet hold the columns text and
            embedding.
        model: Embedding model, as a folder or a Hub id.
        text_column: Column of the texts; .txt has no columns.
        prompt_name: Name of the model's prompt to put before each text.
        normalize: Scale each embedding to length 1.
        batch_size: Number of texts in a batch of the model.

    Returns:
        The output, the number of texts, their dimension, the length in tokens that the model reads, and how many texts are
        longer (None if the tokenizer is not a fast one).

    Raises:
        ValueError: The output has another ending, is an input, or is a folder; a text is not valid; the model cannot be opened;
            or the work needs more memory than is free.
        OSError: A file cannot be read, or the output cannot be written.
    """
    _check_output(Path(output), files)
    text_bytes = sum(Path(file).stat().st_size for file in files if Path(file).is_file())
    check_memory(text_bytes, f"reading {', '.join(files)}", "split the file")
    texts = [text for _, text in read_text_column(files, text_column)]
    encoder = open_for_inference(model)
    check_memory(
        _needed_bytes(encoder, len(texts), batch_size),
        f"embedding {len(texts):,} texts, {batch_size} at once",
        "choose a smaller batch size, or split the file",
    )
    options = {"prompt_name": prompt_name, "normalize_embeddings": normalize}
    try:
        vectors = encoder.encode(texts, batch_size=batch_size, show_progress_bar=True, **options)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {output} is not written, and no embedding is kept", file=sys.stderr)
        raise
    with writing(Path(output)) as handle:
        WRITERS[Path(output).suffix](handle, texts, vectors)
    prompt = encoder.prompts.get(prompt_name or encoder.default_prompt_name, "")
    return {
        "output": output,
        "texts": len(texts),
        "dimension": int(vectors.shape[1]),
        "max_seq_length": _longest_input(encoder),
        "truncated": _num_truncated(encoder, (prompt + text for text in texts)),
    }


def _needed_bytes(encoder: SentenceTransformer, num_texts: int, batch_size: int) -> int:
    """A lower bound: the vectors, twice, and on a CPU the states of a feed-forward layer for a batch of maximum length."""
    vectors = 2 * 4 * num_texts * (encoder.get_embedding_dimension() or 0)  # separate vectors, then one array
    config = getattr(encoder[0], "config", None)  # a StaticEmbedding has none
    if not hasattr(config, "hidden_size") or encoder.device.type != "cpu":
        return vectors
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    width = 3 * config.hidden_size + inner
    return vectors + batch_size * (encoder.max_seq_length or 512) * width * encoder.dtype.itemsize


def _longest_input(model: SentenceTransformer) -> int | None:
    """The number of tokens at which a model truncates a text; None if it reads all of them."""
    longest = model.max_seq_length
    return None if longest is None or math.isinf(longest) else int(longest)


def _num_truncated(model: SentenceTransformer, inputs: Iterable[str]) -> int | None:
    """The number of inputs that are longer than `_longest_input`; None if the tokenizer is not a fast one."""
    longest = _longest_input(model)
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


def _check_output(output: Path, files: Sequence[str]) -> None:
    """Raise an error before the work if the output cannot be written."""
    if output.suffix not in WRITERS:
        raise ValueError(f"output={output} ends in none of {', '.join(WRITERS)}; choose one of them")
    if output.exists() and any(output.samefile(file) for file in files if Path(file).exists()):
        raise ValueError(f"output={output} is also an input, whose other columns would be lost; name another file")
    if output.is_dir():
        raise ValueError(f"output={output} is a folder; name a file")
    try:
        with tempfile.TemporaryFile(dir=output.parent) as handle:
            handle.write(b"0" * 4096)
    except OSError as error:
        raise write_error(error, output, "no text was embedded") from error


def _write_npy(handle: BinaryIO, texts: list[str], vectors: np.ndarray) -> None:
    """As np.save, which does not report that a disk is full."""
    np.lib.format.write_array_header_1_0(handle, np.lib.format.header_data_from_array_1_0(vectors))
    handle.write(np.ascontiguousarray(vectors).data)


def _write_jsonl(handle: BinaryIO, texts: list[str], vectors: np.ndarray) -> None:
    rows = ({"text": text, "embedding": vector.tolist()} for text, vector in zip(texts, vectors))
    handle.writelines(f"{json.dumps(row)}\n".encode() for row in rows)


def _write_parquet(handle: BinaryIO, texts: list[str], vectors: np.ndarray) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    embeddings = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "embedding": embeddings}), handle)


WRITERS = {".npy": _write_npy, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
