"""A model in other runtimes: `export_model` writes the files, `OnnxModel` runs them and needs no torch."""

from ..lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {"exporting": ["export_model"], "onnx_model": ["OnnxModel"]})
