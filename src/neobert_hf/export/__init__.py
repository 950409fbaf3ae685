"""A model in other runtimes: `export_model` writes the files, `OnnxModel` runs them.

Both are imported on first use: `OnnxModel` needs no torch.
"""

import importlib
from importlib.util import find_spec

_MODULES = {"export_model": "exporting", "OnnxModel": "onnx_model"}

__all__ = ["OnnxModel", "export_model"]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    if name == "export_model" and find_spec("torch") is None:
        raise ImportError(f"{__name__}.{name} needs torch; install the package with its dependencies", name="torch")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
