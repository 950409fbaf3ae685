"""ONNX files by torch's exporter, and what is made of them: int8 by the tool of ONNX Runtime, OpenVINO files.

ONNX files are in opset 20, the default of torch 2.13. `transformers.exporters` calls the same exporter, but writes the weights to
a second file, which transformers.js and fastembed do not read.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.export import Dim
from torch.onnx.errors import OnnxExporterError

from ..files.terminal import quiet
from .graphs import Graph

OPSET = 20
INPUTS = ("input_ids", "attention_mask")


@quiet()
def write_onnx(graph: Graph, file: Path, fp16: bool = False) -> None:
    """Write the graph with free numbers of rows and columns: one file, and above 1.5 GB the weights in a second one.

    Args:
        graph: What to export.
        file: The file; its folder exists.
        fp16: Round the network of the graph to float16, which it stays; inputs and outputs do not change. A converter of finished
            graphs also rounds the angles of positions, an error of a tenth of a radian at 200 tokens. The model computes them,
            and its norms, in float32.

    Raises:
        ValueError: The exporter of this version of torch fails.
        OSError: The file cannot be written.
    """
    if fp16:
        graph.model.half()
    # No size of the example equals another one, and none is 1: the exporter would take it for a constant.
    input_ids = torch.full((3, 7), 5)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, 5:] = 0
    attention_mask[2, :2] = 0
    try:
        program = torch.onnx.export(
            graph.eval(),
            kwargs={"input_ids": input_ids, "attention_mask": attention_mask},
            dynamo=True,
            input_names=INPUTS,
            output_names=graph.outputs,
            dynamic_shapes={name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in INPUTS},
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    except OnnxExporterError as error:
        raise ValueError(f"torch {torch.__version__} cannot export this model; install torch 2.13 or newer") from error
    program.save(file)


@quiet()
def write_int8(source: Path, file: Path) -> None:
    """Write an ONNX file with weights in int8, a scale for each channel; activations are rounded when the model runs.

    Weights are unsigned. On an x86 processor without VNNI, ONNX Runtime adds products of unsigned activations with signed weights
    in 16 bits, and such sums saturate: a vector was wrong by a cosine of 0.33 (microsoft/onnxruntime#6004).

    A lookup of one number for a token, its weight, stays in float32. One scale for the weights of all words would round the
    smallest to 0, and a text of such words would have the vector 0.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(source).graph
    columns = {tensor.name for tensor in graph.initializer if tensor.dims[-1:] == [1]}
    lookups = [node for node in graph.node if node.op_type == "Gather"]
    quantize_dynamic(
        source,
        file,
        op_types_to_quantize=["MatMul", "Gather"],
        nodes_to_exclude=[node.name for node in lookups if node.input[0] in columns],
        per_channel=True,
        weight_type=QuantType.QUInt8,
    )


@quiet()
def write_openvino(source: Path, file: Path, int8: bool = False) -> None:
    """Convert an ONNX file to OpenVINO: an `.xml`, and beside it the weights in the `.bin` of the same name.

    Args:
        source: The ONNX file, in float32.
        file: The `.xml` to write.
        int8: Whether nncf rounds the weights to int8.
    """
    import openvino

    model = openvino.Core().read_model(source)
    if int8:
        os.environ.setdefault("NNCF_CI", "1")  # read on import: no statistics about its use are sent
        import nncf

        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    openvino.save_model(model, file, compress_to_fp16=int8)  # of the few numbers that are not int8
