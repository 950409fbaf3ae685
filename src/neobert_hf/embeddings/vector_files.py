"""Embeddings of the texts of files, written to a file: `embed_files`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from ..checkpoints import MINI_MODEL_PATH
from ..checkpoints.embedding_models import (
    fingerprint,
    logger,
    longest_input,
    open_embedding_model,
    prompt_of,
    what_is_read,
)
from ..data.finding import find_texts
from ..data.lengths import (
    Truncation,
    check_leaves_tokens,
    check_max_length,
    fact_of_truncated,
    tokens_lost,
)
from ..data.rows import read_text_column
from ..files.output import check_file, writing
from ..model.machine_neobert import best_dtype
from .kept import Kept

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

OUTPUTS = (".npy", ".jsonl", ".parquet")


def embed_files(
    files: str | Sequence[str],
    output: str,
    model: str = MINI_MODEL_PATH,
    text_column: str = "text",
    prompt_name: str | None = None,
    normalize: bool = False,
    max_length: int | None = None,
    batch_size: int = 64,
    truncation: Truncation = "warn",
    overwrite: bool = False,
) -> dict:
    """Embed the texts of files, and write the embeddings to a file.

    OUTPUT.vectors keeps the vectors until the output is complete, so a call after an interruption embeds what is missing.

    Args:
        files: Files, folders, and patterns, or one of them. Texts are in .txt (a text in each line), .jsonl, .json, .csv, .tsv
            or .parquet.
        output: File to write: .npy holds the embeddings (texts, dimension) in float32; .jsonl and .parquet hold the columns text
            and embedding.
        model: Embedding model, as a folder or a Hub id.
        text_column: Column of the texts; .txt has no columns.
        prompt_name: Name of the model's prompt to put before each text.
        normalize: Scale each embedding to length 1.
        max_length: Length in tokens at which a text is truncated; by default what the model reads.
        batch_size: Number of texts in a batch of the model.
        truncation: What becomes of texts that are longer: "warn" counts them in a warning, "error" refuses them before anything
            is embedded, "off" allows them.
        overwrite: Replace the output, and an OUTPUT.vectors that is not of this model.

    Returns:
        The output, the number of files that were read and that were skipped in folders, the number of texts, their dimension,
        the length in tokens that the model reads, and how many texts are longer.

    Raises:
        ValueError: The output has another ending, a text is not valid or refused, or the model cannot be opened.
        FileExistsError: The output exists, or is an input.
        OSError: A file cannot be read, or the output cannot be written.
    """
    found, skipped = find_texts(files)
    target = Path(output)
    if target.suffix not in OUTPUTS:
        raise ValueError(f"output={output} ends in none of {', '.join(OUTPUTS)}; choose one of them")
    check_file(target, overwrite, found)
    texts = [text for _, text in read_text_column(found, text_column)]
    encoder = open_for_inference(model, max_length)
    prompt = prompt_of(encoder, prompt_name)
    longest = longest_input(encoder) or sys.maxsize
    lost = tokens_lost(encoder.tokenizer, longest, [prompt + text for text in texts])
    if fact := fact_of_truncated(lost, len(texts), longest, truncation):
        logger.warning(f"{fact}; split long texts")
    work = Path(f"{output}.vectors")
    options: dict[str, Any] = {"prompt_name": prompt_name, "normalize_embeddings": normalize}
    kept = Kept(work, f"embed {fingerprint(encoder, {})} {options}")
    if not kept.documents:  # it is not of this model
        check_file(work, overwrite)
    kept.passages(hashlib.sha256(json.dumps(texts).encode()).hexdigest(), partial(enumerate, texts))
    target.parent.mkdir(parents=True, exist_ok=True)
    kept.save(is_required=True)  # an error comes before the work

    def encode(block: list[str]) -> np.ndarray:
        read = [what_is_read(encoder, text) for text in block]
        return encoder.encode(read, batch_size=batch_size, show_progress_bar=False, **options)

    try:
        vectors = kept.vectors(texts, encode)
        with writing(target) as handle:
            _write(handle, target.suffix, texts, vectors)
    except BaseException:  # Ctrl-C too
        kept.save()
        raise
    kept.file.unlink(missing_ok=True)
    return {
        "output": output,
        "files": len(found),
        "skipped_files": skipped.total(),
        "texts": len(texts),
        "dimension": vectors.shape[1],
        "max_seq_length": longest_input(encoder),
        "truncated": sum(map(bool, lost)),
    }


def open_for_inference(model: str, max_length: int | None = None) -> SentenceTransformer:
    """Open an embedding model in the dtype of its config; bf16 weights in the dtype that is fastest on this machine.

    `max_length` is the length in tokens at which texts are truncated; a model that reads texts of any length ignores it.

    Raises:
        ValueError: The model cannot be opened, or has no positions for this length.
    """
    from sentence_transformers.util import get_device_name

    options: dict[str, Any] = {}
    if model == MINI_MODEL_PATH:
        # It is stored in bf16, although its config declares float32.
        options["model_kwargs"] = {"dtype": best_dtype(get_device_name())}
    encoder = open_embedding_model(model, **options)
    if max_length is not None and longest_input(encoder) is not None:
        check_leaves_tokens(max_length, "max_length")
        check_max_length(encoder[0].model, max_length, "max_length")
        encoder.max_seq_length = max_length
    if encoder.dtype == torch.bfloat16 and not options:
        encoder.to(best_dtype(encoder.device))
    return encoder


def _write(handle: BinaryIO, suffix: str, texts: list[str], vectors: np.ndarray) -> None:
    if suffix == ".npy":  # the error of `np.save` would not say that the disk is full
        np.lib.format.write_array_header_1_0(handle, {"descr": "<f4", "fortran_order": False, "shape": vectors.shape})
        handle.write(vectors.data)
    elif suffix == ".jsonl":
        rows = ({"text": text, "embedding": vector.tolist()} for text, vector in zip(texts, vectors))
        handle.writelines(f"{json.dumps(row)}\n".encode() for row in rows)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        embeddings = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "embedding": embeddings}), handle)
