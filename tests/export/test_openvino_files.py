"""An OpenVINO file, converted from the ONNX file, computes what the oracle and sentence-transformers compute."""

import numpy as np
import pytest
from conftest import GOLDEN
from safetensors.torch import load_file

pytest.importorskip("nncf", reason="the export needs pip install -e '.[openvino]'")

import openvino

from neobert_hf.export import export_model

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}  # otherwise bfloat16, where the processor has it


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The golden classifier in OpenVINO, and the report."""
    out = tmp_path_factory.mktemp("golden") / "classifier"
    return out, export_model(GOLDEN / "classifier", out, to=["openvino"], int8=True)


def run(folder, name, inputs):
    model = openvino.Core().compile_model(folder / "openvino" / f"{name}.xml", "CPU", EXACT)
    return model({key: np.asarray(inputs[key]) for key in ("input_ids", "attention_mask")})["logits"]


def error(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def test_a_classifier_agrees_with_the_golden_tensors(exported):
    expected = load_file(GOLDEN / "expected.safetensors")
    found = run(exported[0], "openvino_model", expected)
    assert error(found, expected["classifier_logits"].numpy()) < 1e-5  # float32 sums in another order


def test_int8_weights_are_a_quarter_and_close(exported):
    out, report = exported
    expected = load_file(GOLDEN / "expected.safetensors")
    found, wanted = run(out, "openvino_model_qint8_quantized", expected), expected["classifier_logits"].numpy()
    assert (found * wanted).sum() / np.linalg.norm(found) / np.linalg.norm(wanted) > 0.995
    whole, small = ((out / "openvino" / f"openvino_model{end}.bin").stat().st_size for end in ("", "_qint8_quantized"))
    assert small < 0.3 * whole
    assert list(report["files"]) == [
        "openvino/openvino_model.xml",
        "openvino/openvino_model_qint8_quantized.xml",
    ]


def test_a_folder_for_openvino_alone_holds_no_onnx_file(exported):
    assert {path.name for path in exported[0].iterdir()} == {"config.json", "openvino"}
