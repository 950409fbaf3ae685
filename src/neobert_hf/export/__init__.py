"""A model in other runtimes: `export_model` writes the files, `OnnxModel` runs them and needs no torch."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

if TYPE_CHECKING:
    from .exporting import export_model as export_model
    from .onnx_model import OnnxModel as OnnxModel
    from .predicting import predict_file as predict_file
    from .predictor import Predictor as Predictor, open_folder as open_folder
