"""OpenVINO files, converted from the ONNX file."""

from __future__ import annotations

import os
from pathlib import Path


def write_openvino(source: Path, file: Path) -> None:
    """Convert an ONNX file to OpenVINO, in float32.

    Args:
        source: The ONNX file.
        file: The `.xml` to write; the weights are beside it, in the `.bin` of the same name.
    """
    import openvino

    openvino.save_model(openvino.Core().read_model(source), file, compress_to_fp16=False)


def write_openvino_int8(source: Path, file: Path) -> None:
    """As `write_openvino`, with weights in int8 by nncf."""
    os.environ.setdefault("NNCF_CI", "1")  # read on import: no statistics about its use are sent
    import nncf
    import openvino

    model = nncf.compress_weights(openvino.Core().read_model(source), mode=nncf.CompressWeightsMode.INT8_SYM)
    openvino.save_model(model, file)


def openvino_runner(file: Path, outputs: tuple[str, ...]):
    """Return a function that runs an OpenVINO file on the CPU in float32: inputs by name to a list of outputs."""
    import openvino

    compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(inputs):
        found = compiled(inputs)
        return [found[name] for name in outputs]

    return run
