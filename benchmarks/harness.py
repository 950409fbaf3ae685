"""Shared by the benchmarks: arguments, models by name, runs in turns, the ceiling, a corpus, and the result."""

import argparse
import ast
import gc
import json
import multiprocessing
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from provenance import provenance
from published import PublishedMaskedLM, PublishedModel
from result_tables import render
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.utils import is_flash_attn_2_available

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel, inference_copy
from neobert_hf.model.kernels_neobert import choose_product, linear

# Models of transformers: their type, and values that differ from its defaults. An older transformers may lack a model.
LARGE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
OTHERS = {
    "bert-base": ("bert", {}),
    "bert-large": ("bert", LARGE),
    "roberta-base": ("roberta", {}),
    "roberta-large": ("roberta", LARGE),
    "nomic-bert": ("nomic_bert", {}),
    "modernbert-base": ("modernbert", {}),
    "modernbert-large": (
        "modernbert",
        dict(hidden_size=1024, intermediate_size=2624, num_hidden_layers=28, num_attention_heads=16),
    ),
}
OURS = ("ours", "ours-prepacked", "ours-int8")
MODELS = (*OURS, "published", "openvino", *OTHERS, "modernbert-base-int8")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def read_arguments(description: str, **defaults) -> argparse.Namespace:
    """Read the command line: an option for each default, of its type, and --json for the file of the result."""
    formatter = type("Formatter", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    for name, default in defaults.items():
        options = {"default": default, "help": " "}
        if isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, list):
            options |= {"nargs": "+", "type": type(default[0])}
        else:
            options["type"] = str if default is None else type(default)
        parser.add_argument(f"--{name}", **options)
    parser.add_argument("--json", help="file of the result; its table is written beside it")
    return parser.parse_args()


def docstrings(package: str | None = None) -> list[str]:
    """The docstrings of an installed package, by default of Python's standard library: real texts of different lengths."""
    folder = sysconfig.get_path("stdlib") if package is None else find_spec(package).submodule_search_locations[0]
    files = Path(folder).glob("[!.]*.py") if package is None else Path(folder).rglob("*.py")
    documented, texts = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef), []
    for file in sorted(files):
        nodes = (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, documented))
        texts += filter(None, map(ast.get_docstring, nodes))
    return texts


def neobert_config(max_length: int, num_layers: int) -> NeoBERTConfig:
    """The published shape, with a context of any length; `num_layers` other than 0 makes a quick run."""
    config = NeoBERTConfig(max_position_embeddings=max(max_length, 4096))
    if num_layers:
        config.num_hidden_layers = num_layers
    return config


def build(name: str, dtype: torch.dtype, device: str, max_length: int, num_layers: int, head: bool = False):
    """The model of a name, with random weights; every NeoBERT has the same weights.

    `head=True` builds the masked language model instead of the encoder. "ours-prepacked" is `inference_copy` of the
    model, "-int8" has int8 products.
    """
    if name == "modernbert-base-int8":
        return torch.ao.quantization.quantize_dynamic(
            build("modernbert-base", torch.float32, device, max_length, num_layers, head), {torch.nn.Linear}
        )
    if name in OTHERS:
        model_type, changes = OTHERS[name]
        # RoBERTa counts positions from pad_token_id + 1 = 2
        config = AutoConfig.for_model(model_type, **changes, max_position_embeddings=max_length + 2)
        if num_layers:
            config.num_hidden_layers = num_layers
            if hasattr(config, "layer_types"):
                config.layer_types = config.layer_types[:num_layers]
        auto = AutoModelForMaskedLM if head else AutoModel
        best_attention = "flash_attention_2" if device == "cuda" and is_flash_attn_2_available() else "sdpa"
        return auto.from_config(config, attn_implementation=best_attention, dtype=dtype).to(device).eval()
    torch.manual_seed(0)
    config = neobert_config(max_length, num_layers)
    model = NeoBERTForMaskedLM(config) if head else NeoBERTModel(config)
    if name == "published":
        published = (PublishedMaskedLM if head else PublishedModel)(config)
        published.load_state_dict(model.state_dict())
        model = published
    model = model.to(dtype=dtype, device=device).eval()
    if name in ("ours-prepacked", "ours-int8"):
        model = inference_copy(model, int8=name == "ours-int8")
    return model


class OpenVINOModel:
    """Our encoder in OpenVINO on a CPU: exported, and compiled for each input shape."""

    def __init__(self, model: NeoBERTModel, dtype: torch.dtype):
        import openvino

        example = torch.ones(1, 8, dtype=torch.long)
        with torch.no_grad():
            self.exported = openvino.convert_model(_FirstOutput(model.float()), example_input=example)
        hint = {torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]
        self.options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self.core, self.compiled = openvino.Core(), {}

    def __call__(self, input_ids: torch.Tensor):
        """Run on (B, L) ids, and compile first if the shape is new."""
        shape = tuple(input_ids.shape)
        if shape not in self.compiled:
            self.compiled.clear()
            self.exported.reshape(shape)
            self.compiled[shape] = self.core.compile_model(self.exported, "CPU", self.options)
        return self.compiled[shape]([input_ids.numpy()])


class _FirstOutput(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids).last_hidden_state


class Ceiling:
    """The matrix products of a NeoBERT and nothing else: each weight once, in the same shapes, by the fastest library.

    Attention's products count as if they ran at the speed of these.
    """

    def __init__(self, dtype: torch.dtype, device: str, num_layers: int):
        config = neobert_config(1, num_layers)
        width, inner = config.hidden_size, config.swiglu_width
        shapes = [(width, 3 * width), (width, width), (width, 2 * inner), (inner, width)]
        shapes = shapes * config.num_hidden_layers
        self.layers = [torch.nn.Linear(*shape, bias=False).to(dtype=dtype, device=device).eval() for shape in shapes]
        self.flops_per_token = sum(2 * inputs * outputs for inputs, outputs in shapes)
        self.attention_flops = 4 * width * config.num_hidden_layers  # for each token and each token of its sequence

    def __call__(self, num_tokens: int) -> None:
        """Run the products for a number of tokens."""
        inputs, weight = {}, self.layers[0].weight
        multiply = choose_product(weight.dtype, num_tokens) if weight.device.type == "cpu" else None
        for layer in self.layers:
            if layer.in_features not in inputs:
                inputs[layer.in_features] = torch.ones(
                    num_tokens, layer.in_features, dtype=weight.dtype, device=weight.device
                )
            linear(layer, inputs[layer.in_features], multiply)

    def tokens_per_s(self, num_tokens: int, seconds: float, length: float) -> float:
        """Tokens/s of a NeoBERT on sequences of `length` tokens if all of its products ran at the measured speed."""
        return num_tokens / seconds * self.flops_per_token / (self.flops_per_token + self.attention_flops * length)


def synchronize(device: str) -> None:
    """Wait until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def in_new_process(function: Callable, *arguments):
    """Call the function in a process of its own, which has imported the package and nothing else, and return its result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["neobert_hf"])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result()


def take_turns(
    contenders: dict[str, Callable[[], object]], num_rounds: int, device: str, description: str
) -> dict[str, list[float]]:
    """Run each contender once in each round, A B A B, after one uncounted round; returns the seconds of each run.

    A contender that measures only a part of its work returns the seconds of that part.
    """
    seconds = {name: [] for name in contenders}
    for number in tqdm(range(num_rounds + 1), desc=description, unit=" rounds", leave=False):
        for name, run in contenders.items():
            synchronize(device)
            started = time.perf_counter()
            measured = run()
            synchronize(device)
            if number:
                seconds[name].append(measured if isinstance(measured, float) else time.perf_counter() - started)
    return seconds


def median_and_spread(values: list[float]) -> tuple[float, float]:
    """Median, and half the distance between the largest and the smallest value as a share of it."""
    median = statistics.median(values)
    return median, (max(values) - min(values)) / 2 / median


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median of the ratios within each round, which a temporary slowdown of the machine does not change."""
    return statistics.median(a / b for a, b in zip(numerators, denominators))


def free(device: str) -> None:
    """Free memory between measurements."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def relative_error(states: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    return (F.mse_loss(states.double(), wanted.double()).sqrt() / wanted.double().square().mean().sqrt()).item()


def finish(benchmark: str, rows: list[dict], arguments, **more) -> None:
    """Print the result as JSON in the last line; write it and its table to `arguments.json`, if that is given."""
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    for name, value in settings.items():
        if isinstance(value, str) and Path(value).is_absolute():
            settings[name] = Path(value).name  # the path belongs to the machine, not to the result
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "OMP_", "LD_PRELOAD"))
    }
    result = {"benchmark": benchmark, "settings": settings, "rows": rows, **more, "environment": variables}
    result |= provenance()
    table = render(result)
    print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", "utf-8")
        Path(arguments.json).with_suffix(".md").write_text(table + "\n", "utf-8")
    print(json.dumps(result))
