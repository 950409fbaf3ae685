"""One model in every runtime on a CPU: error, size, latency of one sentence, throughput of a batch.

    python benchmarks/runtimes.py --folder FILES --json benchmarks/results/runtimes_cpu.json
    python benchmarks/runtimes.py --folder FILES --num_layers 2 --num_rounds 1      (a quick run)
    python benchmarks/runtimes.py --folder FILES --model src/neobert_hf/mini        (the encoder of a folder)

The model has the published shape and random weights, or those of `--model`. `--folder` receives the model and all files that are
made from it, which takes minutes; a second run finds them there. All runtimes get the same token ids, those of Python's
docstrings, use `--num_threads` threads, and return the states of all tokens. Batches: one sentence of 16 and of 128 tokens,
8 x 64 tokens, and 8 docstrings of different lengths up to 128 tokens. PyTorch without compiling and llama.cpp compute no
padding, the others do. Each runtime has a process of its own, and the processes take turns, A B A B: a process loads the model,
runs each batch once, and returns the median time of the next runs; the table has the median over the turns. What has a spread
above 10 % is measured again, and left out if it has one again. Errors are those of the states of real tokens over all batches,
against our reference in float64: the largest difference over the largest value, and the smallest cosine. `--paths` chooses
runtimes by name.
No defaults are `compiled`, because torch.compile takes minutes for each new shape of 28 layers, and `node` and `node-int8`, which
need what `make test-runtimes` installs.
"""

import atexit
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from harness import docstrings, finish, in_new_process, median_and_spread, neobert_config, read_arguments
from ragged import stock_tokenizer
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import neobert_hf
from neobert_hf.export import export_model

Batch = dict[str, torch.Tensor]  # (B, L) ids and mask, int64
Run = Callable[[Batch], torch.Tensor]  # returns the states (B, L, D)
NODE = Path(__file__).parents[1] / "tests/export/node"
PROGRAM, PACKAGE = "exported_program.pt2", "aot_inductor.pt2"
BATCHES = "batches.pt"
SHAPES = ((1, 16), (1, 128), (8, 64))
LARGEST_SPREAD = 0.1  # half the range over the median
EXPORTS = {
    "onnx": {"to": ("onnx",), "int8": True},
    "openvino": {"to": ("openvino",), "int8": True},
    "gguf": {"to": ("gguf",)},
    "gguf_q8_0": {"to": ("gguf",), "dtype": "q8_0"},
    "eurobert": {"to": ("eurobert",)},
}


# ---------------------------------------------------------------------------------------- how each runtime runs a batch


def load(folder: Path, **options) -> torch.nn.Module:
    """The model as a user loads it; float32 unless `options` say otherwise."""
    return AutoModel.from_pretrained(folder / "model", **{"dtype": torch.float32} | options)


def in_torch(model: Callable) -> Run:
    """Run a model of PyTorch, or what was made from one."""
    return lambda batch: model(**batch)["last_hidden_state"]


def packed(folder: Path) -> Run:
    """The documents of a batch as one row without padding."""
    model = load(folder)

    def run(batch):
        real = batch["attention_mask"].bool()
        boundaries = F.pad(real.sum(1).cumsum(0), (1, 0)).int()
        return padded(
            model(input_ids=batch["input_ids"][real][None], cu_seq_lens_q=boundaries).last_hidden_state[0], real
        )

    return run


def compiled(folder: Path) -> Run:
    """`torch.compile` with constant weights, in the order that the matrix products read."""
    torch._inductor.config.freezing = True  # as TORCHINDUCTOR_FREEZING=1 does
    return in_torch(torch.compile(load(folder)))


def in_onnx_runtime(file: Path) -> Run:
    """A graph in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(["last_hidden_state"], in_numpy(batch))[0])


def in_openvino(file: Path, precision: str) -> Run:
    """A graph in OpenVINO, whose products have `precision`."""
    import openvino

    options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    model = openvino.Core().compile_model(file, "CPU", options)
    return lambda batch: torch.from_numpy(model(in_numpy(batch))["last_hidden_state"])


def in_numpy(batch: Batch) -> dict:
    """The batch as NumPy arrays."""
    return {name: value.numpy() for name, value in batch.items()}


def in_llama_cpp(file: Path) -> Run:
    """A GGUF in llama.cpp, by llama-cpp-python."""
    import llama_cpp

    threads = dict.fromkeys(("n_threads", "n_threads_batch"), torch.get_num_threads())
    tokens = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), 1024)
    pooling = llama_cpp.LLAMA_POOLING_TYPE_NONE
    model = llama_cpp.Llama(str(file), embedding=True, pooling_type=pooling, verbose=False, **threads, **tokens)

    atexit.register(model.close)

    def run(batch):
        real = batch["attention_mask"].bool()
        documents = [ids[row].tolist() for ids, row in zip(batch["input_ids"], real)]
        model.tokenize = lambda text, **_: documents[int(text)]  # the ids that the other runtimes get
        model.embed([str(index) for index in range(len(documents))])  # returns wrong rows after the first document
        row = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(model.ctx), (int(real.sum()), model.n_embd()))
        return padded(torch.from_numpy(row), real)

    return run


def in_node(folder: Path, dtype: str) -> Run:
    """A graph in transformers.js under Node, a process of its own; ids and states go through pipes."""
    command = ["node", "states.mjs", str(folder.resolve()), dtype, str(torch.get_num_threads())]
    node = subprocess.Popen(command, cwd=NODE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(node.kill)
    width = json.loads((folder / "config.json").read_text("utf-8"))["hidden_size"]

    def run(batch):
        rows = {name: value.tolist() for name, value in batch.items()}
        node.stdin.write(json.dumps(rows).encode() + b"\n")
        node.stdin.flush()
        states = node.stdout.read(4 * batch["input_ids"].numel() * width)
        return torch.frombuffer(bytearray(states), dtype=torch.float32).view(*batch["input_ids"].shape, width)

    return run


def padded(row: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Give the states of a packed row (T, D) the places of their tokens; `real` is (B, L)."""
    return row.new_zeros(*real.shape, row.shape[-1]).masked_scatter(real[..., None], row)


class RuntimePath(NamedTuple):
    """A way to run the model: `make(folder)` gives the function that runs a batch, and `file` of the folder is what it reads."""

    label: str
    command: str
    file: str
    make: Callable[[Path], Run]
    package: str = "torch"


def weights(label: str, command: str, make: Callable[[Path], Run]) -> RuntimePath:
    """A path of PyTorch that reads the weights of the model."""
    return RuntimePath(label, command, "model/model.safetensors", make)


def onnx_file(label: str, file: str, options: str = "") -> RuntimePath:
    """A path of ONNX Runtime."""
    file, command = f"onnx/onnx/{file}", f"neobert export MODEL OUT --to onnx{options}"
    return RuntimePath(label, command, file, lambda folder: in_onnx_runtime(folder / file), "onnxruntime")


def openvino_file(label: str, file: str, options: str = "", precision: str = "f32") -> RuntimePath:
    """A path of OpenVINO."""
    file, command = f"openvino/openvino/{file}", f"neobert export MODEL OUT --to openvino{options}"
    return RuntimePath(label, command, file, lambda folder: in_openvino(folder / file, precision), "openvino")


def node_file(label: str, file: str, dtype: str) -> RuntimePath:
    """A path of transformers.js."""
    command = f'await AutoModel.from_pretrained(OUT, {{ dtype: "{dtype}" }})'
    return RuntimePath(label, command, f"onnx/onnx/{file}", lambda folder: in_node(folder / "onnx", dtype))


def gguf_file(label: str, file: str, options: str = "") -> RuntimePath:
    """A path of llama.cpp."""
    command = f"neobert export MODEL OUT --to gguf{options}"
    return RuntimePath(label, command, file, lambda folder: in_llama_cpp(folder / file), "llama_cpp")


PATHS = {
    "sdpa": weights("PyTorch (SDPA)", "AutoModel.from_pretrained(MODEL)", lambda folder: in_torch(load(folder))),
    "eager": weights(
        "PyTorch, eager attention",
        'from_pretrained(MODEL, attn_implementation="eager")',
        lambda folder: in_torch(load(folder, attn_implementation="eager")),
    ),
    "packed": weights("PyTorch, packed row", "model(input_ids=row, cu_seq_lens_q=boundaries)", packed),
    "bf16": weights(
        "PyTorch, bfloat16",
        "from_pretrained(MODEL, dtype=torch.bfloat16)",
        lambda folder: in_torch(load(folder, dtype=torch.bfloat16)),
    ),
    "copy": weights(
        "inference copy", "inference_copy(model)", lambda folder: in_torch(neobert_hf.inference_copy(load(folder)))
    ),
    "copy-bf16": weights(
        "inference copy, bfloat16",
        "inference_copy(model) of a bfloat16 model",
        lambda folder: in_torch(neobert_hf.inference_copy(load(folder, dtype=torch.bfloat16))),
    ),
    "copy-int8": weights(
        "inference copy, int8",
        "inference_copy(model, int8=True)",
        lambda folder: in_torch(neobert_hf.inference_copy(load(folder), int8=True)),
    ),
    "compiled": weights("torch.compile", "TORCHINDUCTOR_FREEZING=1, torch.compile(model)", compiled),
    "exported": RuntimePath(
        "torch.export",
        "torch.export.export(model, ...)",
        PROGRAM,
        lambda folder: in_torch(torch.export.load(folder / PROGRAM).module()),
    ),
    "aot": RuntimePath(
        "AOTInductor",
        "torch._inductor.aoti_compile_and_package(program)",
        PACKAGE,
        lambda folder: in_torch(torch._inductor.aoti_load_package(str(folder / PACKAGE))),
    ),
    "onnx": onnx_file("ONNX Runtime", "model.onnx"),
    "onnx-int8": onnx_file("ONNX Runtime, int8", "model_quantized.onnx", " --int8"),
    "openvino": openvino_file("OpenVINO", "openvino_model.xml"),
    "openvino-bf16": openvino_file("OpenVINO, bfloat16 products", "openvino_model.xml", precision="bf16"),
    "openvino-int8": openvino_file("OpenVINO, int8 weights", "openvino_model_qint8_quantized.xml", " --int8"),
    "node": node_file("transformers.js, Node", "model.onnx", "fp32"),
    "node-int8": node_file("transformers.js, Node, int8", "model_quantized.onnx", "q8"),
    "gguf": gguf_file("llama.cpp", "gguf/model-f32.gguf"),
    "gguf-q8_0": gguf_file("llama.cpp, q8_0", "gguf_q8_0/model-q8_0.gguf", " --dtype q8_0"),
    "eurobert": RuntimePath(
        "stock transformers",
        "neobert export MODEL OUT --to eurobert",
        "eurobert/model.safetensors",
        lambda folder: in_torch(AutoModel.from_pretrained(folder / "eurobert", dtype=torch.float32)),
    ),
}


# ------------------------------------------------------------------------------------ files, batches, measurement


def make_files(arguments, folder: Path) -> None:
    """Write the files that the chosen paths read, unless the folder has them."""
    source, files = arguments.model, {PATHS[name].file for name in arguments.paths}
    if not (folder / "model").exists():
        torch.manual_seed(0)
        random = neobert_hf.NeoBERTModel(neobert_config(512, arguments.num_layers))
        (AutoModel.from_pretrained(source) if source else random).save_pretrained(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(source) if source else stock_tokenizer()
        tokenizer.save_pretrained(folder / "model")
    for name, options in EXPORTS.items():
        if any(file.startswith(f"{name}/") for file in files) and not (folder / name).exists():
            export_model(folder / "model", folder / name, **options)
    if files & {PROGRAM, PACKAGE} and not (folder / PROGRAM).exists():
        example = {name: torch.ones(3, 7, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        shape = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
        program = torch.export.export(load(folder), (), example, dynamic_shapes=dict.fromkeys(example, shape))
        torch.export.save(program, folder / PROGRAM)
    if PACKAGE in files and not (folder / PACKAGE).exists():
        program = torch.export.load(folder / PROGRAM)
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / PACKAGE))


def size_mb(file: Path) -> float:
    """The size of a file in MB, with its weights where they lie beside it."""
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.stem}.*")) / 1e6


def make_batches() -> dict[str, Batch]:
    """Docstrings as ids of the mini model's tokenizer, which are ids of the published vocabulary too."""
    tokenizer = AutoTokenizer.from_pretrained(neobert_hf.MINI_MODEL_PATH)
    texts = docstrings()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()[:64]
    documents = tokenizer([texts[index] for index in order], truncation=True, max_length=128)["input_ids"]
    stream = torch.tensor([token for document in documents for token in document])
    full = {f"{rows} x {length}": stream[: rows * length].view(rows, length) for rows, length in SHAPES}
    batches = {name: {"input_ids": ids, "attention_mask": torch.ones_like(ids)} for name, ids in full.items()}
    return batches | {"8 docstrings": dict(tokenizer.pad({"input_ids": documents[:8]}, return_tensors="pt"))}


def compare(run: Run, batches: dict[str, Batch], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest error over the largest value, and the smallest cosine, of the states of real tokens."""
    errors, cosines = [], []
    for name, batch in batches.items():
        real = batch["attention_mask"].bool()
        states, right = run(batch)[real].double(), wanted[name][real]
        errors.append((states - right).abs().max() / right.abs().max())
        cosines.append(F.cosine_similarity(states, right, dim=-1).min())
    return {"error": max(errors).item(), "cosine": min(cosines).item()}


def measure(name: str, folder: Path, num_threads: int) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of a path, and its median seconds for each batch; runs in a process of its own."""
    torch.set_num_threads(num_threads)
    logging.disable_progress_bar()  # of loading weights
    neobert_hf.tune_allocator()
    batches, wanted = torch.load(folder / BATCHES)
    run, seconds = PATHS[name].make(folder), {}
    with torch.inference_mode():
        errors = compare(run, batches, wanted)
        for batch_name, batch in batches.items():
            runs = []
            for _ in range(9 if len(batch["input_ids"]) == 1 else 3):
                started = time.perf_counter()
                run(batch)
                runs.append(time.perf_counter() - started)
            seconds[batch_name] = statistics.median(runs)
    return errors, seconds


def take_turns(names: list[str], arguments) -> dict[str, list]:
    """The results of `measure` for each path, one in each round."""
    results = {name: [] for name in names}
    for _ in range(arguments.num_rounds):
        for name in tqdm(names, desc="turn", unit=" paths", leave=False):
            results[name].append(in_new_process(measure, name, Path(arguments.folder), arguments.num_threads))
    return results


def rows_of(name: str, results: list, batches: dict[str, Batch]) -> list[dict]:
    """A row for each batch."""
    rows = []
    for batch_name, batch in batches.items():
        median, spread = median_and_spread([seconds[batch_name] for _, seconds in results])
        num_tokens = int(batch["attention_mask"].sum())
        row = {"path": PATHS[name].label, "batch": batch_name, "sequences": len(batch["input_ids"])}
        row |= {"tokens": num_tokens, "real_share": num_tokens / batch["input_ids"].numel()}
        rows.append(row | {"milliseconds": median * 1000, "tokens_per_s": num_tokens / median, "spread": spread})
    return rows


def main():
    """Make the files, compare, measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        folder="build/runtimes",
        model=None,
        paths=[name for name in PATHS if name not in ("compiled", "node", "node-int8")],
        num_layers=0,
        num_rounds=3,
        num_threads=os.cpu_count(),
    )
    if unknown := set(arguments.paths) - set(PATHS):
        raise SystemExit(f"--paths: {', '.join(sorted(unknown))} is not one of {', '.join(PATHS)}")
    packages = {PATHS[name].package for name in arguments.paths}
    if missing := [package for package in packages if not find_spec(package)]:
        raise SystemExit(
            f"{', '.join(missing)} is not installed; install it (llama_cpp: llama-cpp-python), or choose other --paths"
        )
    torch.set_num_threads(arguments.num_threads)
    logging.disable_progress_bar()
    folder, batches = Path(arguments.folder), make_batches()
    make_files(arguments, folder)
    with torch.inference_mode():
        reference = in_torch(load(folder, dtype=torch.float64))
        torch.save((batches, {name: reference(batch) for name, batch in batches.items()}), folder / BATCHES)
        del reference
    results = take_turns(arguments.paths, arguments)
    rows = {name: rows_of(name, found, batches) for name, found in results.items()}
    again = [name for name, found in rows.items() if any(row["spread"] > LARGEST_SPREAD for row in found)]
    for name, found in take_turns(again, arguments).items():
        rows[name] = [
            min(pair, key=lambda row: row["spread"]) for pair in zip(rows[name], rows_of(name, found, batches))
        ]
    paths = []
    for name in arguments.paths:
        path, errors = PATHS[name], results[name][0][0]
        paths.append({"path": path.label, "command": path.command, "mb": size_mb(folder / path.file), **errors})
    names = packages_distributions()
    runtimes = {name: version(name) for name in sorted(names[package][0] for package in packages - {"torch"})}
    every = [row for found in rows.values() for row in found]
    stable = [row for row in every if row["spread"] <= LARGEST_SPREAD]
    unstable = [f"{row['path']} at {row['batch']}" for row in every if row not in stable]
    finish("runtimes", stable, arguments, paths=paths, runtimes=runtimes, unstable=unstable)


if __name__ == "__main__":
    main()
