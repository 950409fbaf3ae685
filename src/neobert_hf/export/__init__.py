"""Other runtimes: one module for each format, and a class that runs an exported folder without torch."""

from importlib import import_module

__all__ = ["OnnxModel", "export_model"]

_MODULES = {"OnnxModel": "onnx_model", "export_model": "exporting"}


def __getattr__(name: str):
    """Import a public name when it is used: `OnnxModel` runs where torch is not installed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
