"""A model in other runtimes: `export_model` writes the files, `OnnxModel` runs them.

Both are imported on first use: `OnnxModel` needs no torch.
"""

import importlib

_MODULES = {"export_model": "exporting", "OnnxModel": "onnx_model"}

__all__ = ["OnnxModel", "export_model"]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
