"""Tables of the model: Auto classes, attention backends, errors against the oracle, hostile inputs."""

from tabulate import tabulate

from neobert_hf import AUTO_CLASSES
from neobert_hf.model.backends_neobert import BACKENDS, Backend
from page_tables.results import result_of, source


def auto_classes() -> str:
    """The Auto classes and what each of them loads."""
    rows = [[f"`{name}`", f"`{loaded.__name__}`", _first_line(loaded)] for name, loaded in AUTO_CLASSES.items()]
    return tabulate(rows, headers=["Auto class", "loads", ""], tablefmt="github")


def _first_line(documented) -> str:
    return documented.__doc__.strip().splitlines()[0].rstrip(".")


# What has run where; tests/test_backends_neobert.py holds the tests behind "simulated".
TRIED = {
    "cpu": {
        "cpu_tiled": "measured",
        "sdpa": "measured",
        "eager": "measured",
        "flex_attention": "measured, no backward",
    },
    "cuda": dict.fromkeys(
        ("flash_attention_3", "flash_attention_2", "flash_attention_4", "torch_varlen", "xformers", "sdpa"), "simulated"
    ),
    "mps": {"sdpa": "simulated"},
}


def backends() -> str:
    """The table of attention backends: what each needs, and what has run where."""
    rows = [
        [
            f"`{name}`",
            _needs(backend),
            *(
                TRIED[device].get(name, "untried") if device in (backend.devices or TRIED) else ""
                for device in ("cpu", "cuda", "mps")
            ),
        ]
        for name, backend in BACKENDS.items()
    ]
    return tabulate(rows, headers=["", "needs", "CPU", "CUDA", "MPS"], tablefmt="github")


def _needs(backend: Backend) -> str:
    parts = [f"heads of a multiple of {backend.head_multiple}, up to {backend.max_head_width}"]
    parts = parts if backend.max_head_width else []
    ranges = {}
    for dtype, limits in backend.capabilities.items():
        ranges.setdefault(limits, []).append(str(dtype).removeprefix("torch."))
    for (lowest, highest), dtypes in ranges.items():
        capability = f"{lowest[0]}.{lowest[1]} " + (f"to {highest[0]}.{highest[1]}" if highest[0] < 99 else "or newer")
        parts.append(", ".join(dtypes) + (f": capability {capability}" if lowest > (0, 0) else ""))
    return "; ".join([*parts, *(["a model that only infers"] if backend.is_for_inference else [])])


def agreement() -> str:
    """Errors against the oracle."""
    result = result_of("agreement")
    table = tabulate(result["rows"], headers="keys", tablefmt="github", floatfmt=".1e")
    settings = result["settings"]
    return (
        f"{table}\n\nLargest error of the logits over their largest value; {settings['num_hidden_layers']} layers, "
        f"random weights, documents of {', '.join(map(str, settings['lengths']))} tokens; {source(result)}."
    )


def adversary() -> str:
    """How the cases of `make test-adversary` ended."""
    result = result_of("adversary")
    table = tabulate(result["rows"], headers="keys", tablefmt="github")
    return f"{table}\n\nSeed {result['seed']}, {result['seconds'] / 60:.0f} minutes. {source(result)}."
