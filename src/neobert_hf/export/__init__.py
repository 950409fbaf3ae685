"""A model in other runtimes: `export_model` writes the files, `OnnxModel` runs them and needs no torch."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

NAMES_OF = {"exporting": ("export_model",), "onnx_model": ("OnnxModel",)}
__getattr__, __dir__, __all__ = lazy_names(__name__, NAMES_OF)

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from .exporting import export_model as export_model
    from .onnx_model import OnnxModel as OnnxModel
