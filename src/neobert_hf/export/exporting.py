"""`export_model`: one folder with a model for other runtimes, compared with torch before it appears."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..files.trust import keep_known_settings, resolve
from ..files.writing import saving, write_json, writing
from .graphs import EmbeddingGraph, Graph, open_graph, quiet
from .onnx import onnx_runner, write_fp16, write_int8, write_onnx
from .openvino import openvino_runner, write_openvino, write_openvino_int8
from .parity import Reference, Run

logger = logging.get_logger(__name__)

# Packages of each format; an extra has its name.
PACKAGES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf"),
    "gguf": ("gguf",),
}
DTYPES = ("f32", "f16", "q8_0")
LARGEST_FILE = 2**31 - 2**20  # bytes of an ONNX file: protobuf's limit, less the graph itself


def export_model(
    source: str | Path,
    out: str | Path,
    to: Iterable[str] = ("onnx",),
    int8: bool = False,
    fp16: bool = False,
    dtype: str = "f32",
    task: str | None = None,
) -> dict[str, Any]:
    """Write a folder that other runtimes read: ONNX, OpenVINO or GGUF files, config and tokenizer.

    Args:
        source: Folder or Hub id of a NeoBERT, with or without a head, or of an embedding model.
        out: Folder to write, new or empty. It appears when it is complete and agrees with torch.
        to: Formats: "onnx", "openvino", "gguf".
        int8: Also write ONNX and OpenVINO files in int8.
        fp16: Also write an ONNX file in float16.
        dtype: Numbers of the GGUF file: "f32", "f16" or "q8_0".
        task: What to export, such as "fill-mask" or "feature-extraction"; by default that for which the model was saved.

    Returns:
        The folder, its task, and for each file its size in bytes and its largest errors.

    Raises:
        ValueError: The model cannot be exported, a file differs from torch more than its limit, or an argument is wrong.
        OSError: A file cannot be read or written.
        ImportError: A package is missing.
    """
    formats = _check_formats(to, int8, fp16, dtype)
    folder, out = resolve(source), Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; choose another one")
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{out} is inside the model's folder, which is never changed; choose another folder")
    graph = open_graph(folder, task)
    target = out.resolve()  # of a link, and of "."
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        saving(out, "nothing is left of it"),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as beside,
    ):
        built = Path(beside, target.name)
        built.mkdir()
        reference = Reference(graph)
        files = _write_gguf(graph, reference, built, dtype) if "gguf" in formats else {}
        if formats != ["gguf"]:
            with quiet():
                files |= _write_graphs(graph, reference, built, formats, int8, fp16)
        _write_settings(graph, built)
        if target.exists():  # the working folder of a shell must stay the same one
            for part in sorted(built.iterdir(), key=lambda part: part.name == "config.json"):
                shutil.move(part, target)
        else:
            os.replace(built, target)
    return {"folder": str(out), "task": graph.task, "files": files}


def _check_formats(to: Iterable[str], int8: bool, fp16: bool, dtype: str) -> list[str]:
    """Return the formats as a list, after a check of the arguments and of the packages that they need."""
    formats = [to] if isinstance(to, str) else list(dict.fromkeys(to))
    if not formats or (unknown := [name for name in formats if name not in PACKAGES]):
        raise ValueError(f"to={unknown[0] if formats else formats!r} is no format; choose from {', '.join(PACKAGES)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    if dtype != "f32" and "gguf" not in formats:
        raise ValueError(
            f"dtype={dtype!r} is for GGUF files; add gguf to the formats, or choose int8 or fp16 for the others"
        )
    if int8 and formats == ["gguf"]:
        raise ValueError("int8 is for ONNX and OpenVINO files; for GGUF choose dtype q8_0")
    if fp16 and "onnx" not in formats:
        raise ValueError("fp16 is for ONNX files; add onnx to the formats, or leave it out")
    for name in formats:
        if missing := [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]:
            raise ImportError(f"{' and '.join(missing)} not installed; install: pip install -e '.[{name}]'")
    return formats


def _write_gguf(graph: Graph, reference: Reference, built: Path, dtype: str) -> dict[str, dict]:
    """Write the GGUF file, compare it with torch if llama-cpp-python is there, and return its entry of the report."""
    from .gguf import llama_cpp_runner, write_gguf

    file = built / f"model-{dtype}.gguf"
    write_gguf(graph, file, dtype)
    report = {"bytes": file.stat().st_size}
    if importlib.util.find_spec("llama_cpp") is None:
        logger.warning(
            f"{file.name} was not compared with torch; to compare it: pip install llama-cpp-python, and export again"
        )
        return {file.name: {**report, "not_compared": "llama-cpp-python is not installed"}}
    kind = {"f32": "float32", "f16": "float16", "q8_0": "int8"}[dtype]
    return {file.name: {**report, **reference.check(file, llama_cpp_runner(file, graph), kind)}}


def _write_graphs(
    graph: Graph, reference: Reference, built: Path, formats: list[str], int8: bool, fp16: bool
) -> dict[str, dict]:
    """Write the ONNX and OpenVINO files, compare them with torch, and return their entries of the report."""
    num_bytes = sum(4 * parameter.numel() for parameter in graph.parameters())
    if num_bytes > LARGEST_FILE:
        raise ValueError(
            f"the model takes {num_bytes / 1e9:.1f} GB, and an ONNX file holds at most 2 GB; choose a smaller model"
        )
    whole, small_openvino = built / "onnx/model.onnx", "openvino/openvino_model_qint8_quantized.xml"
    onnx, openvino = "onnx" in formats, "openvino" in formats
    files = [
        (True, "onnx/model.onnx", lambda _, file: write_onnx(graph, file), onnx_runner, "float32"),
        (onnx and int8, "onnx/model_quantized.onnx", write_int8, onnx_runner, "int8"),
        (openvino, "openvino/openvino_model.xml", write_openvino, openvino_runner, "float32"),
        (openvino and int8, small_openvino, write_openvino_int8, openvino_runner, "int8"),
        # the last one, because it rounds the graph itself
        (fp16, "onnx/model_fp16.onnx", lambda _, file: write_fp16(graph, file), onnx_runner, "float16"),
    ]
    report = {}
    for is_wanted, name, write, runner, kind in files:
        if is_wanted:
            file = built / name
            file.parent.mkdir(exist_ok=True)
            try:
                write(whole, file)
                report[name] = _describe(file, runner, reference, kind)
            except (ValueError, OSError, ImportError, MemoryError):
                raise
            except Exception as error:  # onnx, ONNX Runtime and OpenVINO have no class for a full disk
                raise OSError(f"{name} is damaged ({' '.join(str(error).split())}; is the disk full?)") from error
    if not onnx:
        shutil.rmtree(whole.parent)
        del report["onnx/model.onnx"]
    return report


def _describe(file: Path, runner: Callable[..., Run], reference: Reference, kind: str) -> dict:
    """The size of a file in bytes, and its differences from torch."""
    num_bytes = sum(part.stat().st_size for part in (file, file.with_suffix(".bin")) if part.exists())
    return {"bytes": num_bytes, **reference.check(file, runner(file, reference.graph.outputs), kind)}


def _write_settings(graph: Graph, folder: Path) -> None:
    """Write config, tokenizer, and the modules of an embedding model; config.json last, without which no tool loads a folder."""
    config, tokenizer = graph.model.config, graph.tokenizer
    if tokenizer is not None:
        tokenizer.model_max_length = graph.longest
        tokenizer.backend_tokenizer.no_truncation()  # the settings of the last call
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.save_pretrained(folder)
        write_json(folder / "special_tokens_map.json", tokenizer.special_tokens_map)  # fastembed reads it
    if isinstance(graph, EmbeddingGraph):
        _write_modules(graph, folder)
    config.architectures = [type(graph.model).__name__]
    keep_known_settings(config, folder)
    with writing(folder / "config.json") as file:  # save_pretrained of the config would add code
        file.write(config.to_json_string().encode())


def _write_modules(graph: EmbeddingGraph, folder: Path) -> None:
    """Write what sentence-transformers 3.4 to 6.2 and servers read beside a graph; weights and Dense are in the graph."""
    import sentence_transformers

    from ..embeddings.common_form import POOLING_MODES

    model = graph.whole
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | (
        {"2_Normalize": "Normalize"} if graph.ends_normalized else {}
    )
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
    flags = {flag: mode == graph.pooling_mode for mode, flag in POOLING_MODES.items()}
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": graph.dimension, **flags, "include_prompt": graph.pooling.include_prompt}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": graph.longest, "do_lower_case": False})
    settings = {
        "__version__": {"sentence_transformers": sentence_transformers.__version__},
        "model_type": "SentenceTransformer",
        "prompts": model.prompts,
        "default_prompt_name": model.default_prompt_name,
        "similarity_fn_name": model.similarity_fn_name,
    }
    write_json(folder / "config_sentence_transformers.json", settings)
