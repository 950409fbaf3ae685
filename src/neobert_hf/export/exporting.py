"""`export_model`: one folder with a model for other runtimes, compared with torch before it appears."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..checkpoints.eurobert import open_twin, save_twin, twin_config, write_card_of_twin
from ..checkpoints.network import AUTO_CLASS_OF
from ..checkpoints.saved_model import SETTINGS, WEIGHTS
from ..data.lengths import as_list
from ..files.messages import say
from ..files.output import check_folder, new_folder, write_json, writing
from ..files.terminal import quiet
from ..model.modeling_neobert import AUTO_CLASSES
from .graphs import EMBEDDING, LOADING, MULTI_VECTOR, TASKS, EmbeddingGraph, Graph, SearchGraph, load_graph
from .onnx import write_int8, write_onnx, write_openvino
from .onnx_model import FILES, QUERY, open_graph
from .parity import Reference, torch_runner

logger = logging.get_logger(__name__)

# Packages of each format; an extra has its name.
PACKAGES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf"),
    "gguf": ("gguf",),
    "eurobert": (),
}
DTYPES = {"f32": "float32", "f16": "float16", "q8_0": "int8"}  # of GGUF files, and how they are compared


def export_model(
    source: str | Path,
    out: str | Path,
    to: Iterable[str] = ("onnx",),
    int8: bool = False,
    fp16: bool = False,
    dtype: str = "f32",
    task: str | None = None,
) -> dict[str, Any]:
    """Write a folder that other runtimes read: ONNX, OpenVINO or GGUF files, or a EuroBERT; config and tokenizer.

    Args:
        source: Folder or Hub id of a NeoBERT, with or without a head, or of a model of sentence-transformers.
        out: Folder to write, new or empty. It appears when it is complete and agrees with torch.
        to: Formats: "onnx", "openvino", "gguf"; or "eurobert" alone, the same network for transformers without code of this
            library.
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
    check_folder(Path(out))
    graph = load_graph(source, task)
    if formats == {"eurobert"}:
        twin_config(graph.model, graph.task, graph.tokenizer)  # an error if it has no such twin
    reference = Reference(graph)
    with new_folder(Path(out)) as built:
        if formats == {"eurobert"}:
            report = {WEIGHTS: _write_eurobert(reference, built)}
        else:
            report = {}
            for name, write, kind in _planned_files(graph, built, formats, int8, fp16, dtype):
                say(f"writing {name}, and comparing it with torch")
                report[name] = _write_file(reference, built / name, write, kind)
            if "onnx" not in formats and "openvino" in formats:  # it was made of the ONNX file
                shutil.rmtree(built / "onnx")
                del report[FILES["onnxruntime"]["fp32"]]
            _write_settings(graph, built)
    return {"folder": str(out), "task": graph.task, "files": report}


def agreement(entry: dict[str, Any]) -> str:
    """Return in words how a file agrees with torch, by its entry in the report of `export_model`."""
    if "errors" in entry:
        return f"largest error {max(entry['errors'].values()):.1g}"
    return f"smallest cosine {entry['smallest_cosine']}" if "smallest_cosine" in entry else "not compared"


def _check_formats(to: Iterable[str], int8: bool, fp16: bool, dtype: str) -> set[str]:
    """Return the formats, after a check of the arguments and of the packages that they need."""
    formats = set(as_list(to))
    if not formats or not formats <= PACKAGES.keys():
        raise ValueError(f"to={sorted(formats)} is not one or more of {', '.join(PACKAGES)}")
    if "eurobert" in formats and len(formats) > 1:
        raise ValueError("eurobert is a model with its own config.json; export it to a folder of its own")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    needs = [
        ("int8", int8, {"onnx", "openvino"}),
        ("fp16", fp16, {"onnx"}),
        ("dtype", dtype != "f32", {"gguf"}),
    ]
    for option, is_given, needed in needs:
        if is_given and not needed & formats:
            fault = f"{option} is for {' and '.join(sorted(needed))} files"
            raise ValueError(f"{fault}; add such a format, or leave it out")
    for name in sorted(formats):
        missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
        if missing:
            raise ImportError(f"{' and '.join(missing)} not installed; install: pip install 'neobert_hf[{name}]'")
    if "eurobert" in formats and importlib.util.find_spec("transformers.models.eurobert") is None:
        version = importlib.metadata.version("transformers")
        raise ImportError(f"transformers {version} has no EuroBERT; install transformers 5.3 or newer")
    return formats


def _planned_files(
    graph: Graph, built: Path, formats: set[str], int8: bool, fp16: bool, dtype: str
) -> Iterator[tuple[str, Callable[[Path], None], str]]:
    """Yield the name of each file, the function that writes it, and the kind of its numbers."""
    onnx = FILES["onnxruntime"]
    openvino = FILES["openvino"]
    whole = built / onnx["fp32"]
    if "gguf" in formats:
        yield f"model-{dtype}.gguf", partial(_write_gguf, graph, dtype), DTYPES[dtype]
    if formats != {"gguf"}:
        yield onnx["fp32"], partial(write_onnx, graph), "float32"
    if int8 and "onnx" in formats:
        yield onnx["int8"], partial(write_int8, whole), "int8"
    if "openvino" in formats:
        yield openvino["fp32"], partial(write_openvino, whole), "float32"
    if int8 and "openvino" in formats:
        yield openvino["int8"], partial(write_openvino, whole, int8=True), "int8"
    if fp16:  # the last one, because it rounds the graph itself
        yield onnx["fp16"], partial(write_onnx, graph, fp16=True), "float16"


def _write_gguf(graph: Graph, dtype: str, file: Path) -> None:
    from .gguf import write_gguf  # the package gguf is optional

    write_gguf(graph, file, dtype)


def _write_file(reference: Reference, file: Path, write: Callable[[Path], None], kind: str) -> dict[str, Any]:
    """Write a file, compare it with torch, and return its entry of the report."""
    file.parent.mkdir(exist_ok=True)
    try:
        write(file)
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # onnx, ONNX Runtime and OpenVINO have no class for a full disk
        raise OSError(f"{file.name} cannot be written ({' '.join(str(error).split())})") from error
    entry = {"bytes": sum(part.stat().st_size for part in file.parent.glob(f"{file.stem}.*"))}  # with weights beside it
    if file.suffix != ".gguf":
        return {**entry, **reference.check(file, open_graph(file)[1], kind)}
    if importlib.util.find_spec("llama_cpp") is None:
        remedy = "to compare it: pip install llama-cpp-python, and export again"
        logger.warning(f"{file.name} was not compared with torch; {remedy}")
        return {**entry, "not_compared": "llama-cpp-python is not installed"}
    from .gguf import llama_cpp_runner

    return {**entry, **reference.check(file, llama_cpp_runner(file, reference.graph), kind)}


def _write_eurobert(reference: Reference, folder: Path) -> dict[str, Any]:
    """Write the twin of a model with tokenizer, modules of an embedding model, and card; compare it with torch in float32.

    The weights keep the dtype in which the source stores them. The graph loses the model, so that the memory holds one.

    Returns:
        Its entry of the report.
    """
    graph, file = reference.graph, folder / WEIGHTS
    config = twin_config(graph.model, graph.task, graph.tokenizer)
    dtype = save_twin(graph.model, config, graph.saved, folder)
    if graph.tokenizer is not None:
        graph.tokenizer.save_pretrained(folder)
    graph.model = None  # type: ignore[assignment]  # which frees it
    if isinstance(graph, EmbeddingGraph):
        with quiet():
            graph.chain[0].model = open_twin(config, folder, dtype=dtype)
        graph.chain.save(str(folder), create_model_card=False)
        graph.chain[0].model = None
        config.save_pretrained(folder)  # again: the chain writes the dtype of the weights
    with quiet():  # as a user opens it
        if isinstance(graph, EmbeddingGraph):
            twin = EmbeddingGraph(type(graph.chain)(str(folder), device="cpu", model_kwargs=LOADING), graph.task)
        else:
            twin = Graph(graph.task, open_twin(config, folder, **LOADING), graph.tokenizer)
    found = {"bytes": file.stat().st_size} | reference.check(file, torch_runner(twin.float().eval()), "float32")
    if graph.tokenizer is not None:
        write_card_of_twin(graph.saved, folder)
    return found


def _write_settings(graph: Graph, folder: Path) -> None:
    """Write config, tokenizer, and the modules of an embedding model."""
    config, tokenizer = graph.model.config, graph.tokenizer
    if tokenizer is not None:
        tokenizer.model_max_length = graph.longest
        tokenizer.backend_tokenizer.no_truncation()  # the settings of the last call
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.save_pretrained(folder)
        write_json(folder / "special_tokens_map.json", tokenizer.special_tokens_map)  # fastembed reads it
    if graph.task == EMBEDDING:
        _write_modules(graph, folder)
    elif isinstance(graph, SearchGraph):
        _write_tasks(graph, folder)
    elif graph.prompts:
        write_json(folder / SETTINGS, graph.prompts)
    kind, _ = TASKS[graph.task]
    config.architectures = [AUTO_CLASSES[AUTO_CLASS_OF[kind]].__name__]  # by which other programs know the task
    with writing(folder / "config.json") as file:  # save_pretrained of the config would add code
        file.write(config.to_json_string().encode())


def _write_modules(graph: EmbeddingGraph, folder: Path) -> None:
    """Write what sentence-transformers 3.4 to 6.2 and servers read beside a graph; weights and Dense are in the graph."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    from ..checkpoints.common_form import older_settings

    chain, kinds = graph.chain, {"": "Transformer", "1_Pooling": "Pooling"}
    if graph.ends_normalized:
        kinds["2_Normalize"] = "Normalize"
    settings = {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(kinds.items())
        ],
        "1_Pooling/config.json": older_settings(Pooling(chain.get_embedding_dimension(), graph.pooling_mode)),
        "sentence_bert_config.json": {"max_seq_length": graph.longest, "do_lower_case": False},
        SETTINGS: chain._get_model_config() | {"truncate_dim": None},  # the graph cuts
    }
    (folder / "1_Pooling").mkdir()
    for name, content in settings.items():
        write_json(folder / name, content)


def _write_tasks(graph: SearchGraph, folder: Path) -> None:
    """Write what sentence-transformers says of queries and documents: prompts, lengths, expansion, and the weights of words.

    There is no modules.json, by which other programs would pool the output of the graph once more.
    """
    chain, query = graph.chain, graph.query
    write_json(folder / SETTINGS, chain._get_model_config())
    if query is not None:
        query.tokenizer.model_max_length = min(query.max_seq_length, 1 << 30)  # tokenizers count no further
        query.save(str(folder / QUERY))
    elif graph.task == MULTI_VECTOR:
        settings = chain[0].get_config_dict()
        if expansion := settings.get("query_expansion"):
            expansion["token"] = expansion["token"] or chain.tokenizer.mask_token or chain.tokenizer.eos_token
        write_json(folder / "sentence_bert_config.json", settings)
