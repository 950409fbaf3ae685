"""The published layout loads natively, by the conversion that transformers does while it loads a checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file, save_file

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification

pytest.importorskip("transformers.models.eurobert", reason="EuroBERT is native since transformers 5")
conversion = pytest.importorskip("transformers.core_model_loading", reason="transformers 5 converts while it loads")
if not hasattr(conversion, "PermuteForRope"):
    pytest.skip("this transformers has no PermuteForRope", allow_module_level=True)

ROOT = Path(__file__).parents[3]
FP32 = 1e-5  # of the largest value: another order of summation

# One process for all checkpoints, without the package: its registration of the model type would win.
SCRIPT = """
import json, sys

sys.modules["neobert_hf"] = None
import modular_neobert
import torch
import transformers
from safetensors.torch import load_file, save_file

report = {}
for name, (source, auto, batch) in json.loads(sys.argv[1]).items():
    model, info = getattr(transformers, auto).from_pretrained(source, output_loading_info=True)
    with torch.no_grad():
        logits = model.eval()(**load_file(batch)).logits
    model.save_pretrained(name)
    save_file({"logits": logits}, f"{name}/logits.safetensors")
    report[name] = [type(model).__name__, {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}]
print(json.dumps(report))
"""
AUTO = {"masked_lm": "AutoModelForMaskedLM", "classifier": "AutoModelForSequenceClassification"}


def right_padded(vocab_size):
    ids = torch.randint(5, vocab_size, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 13:], mask[2, 3:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def native(checkpoint, classifier_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    expected = load_file(GOLDEN / "expected.safetensors")
    save_file({name: expected[name] for name in ("input_ids", "attention_mask")}, folder / "golden.safetensors")
    save_file(right_padded(96), folder / "replica.safetensors")
    jobs = {f"golden-{kind}": (GOLDEN / kind, auto, "golden.safetensors") for kind, auto in AUTO.items()}
    for kind, source in (("masked_lm", checkpoint), ("classifier", classifier_checkpoint)):
        jobs[f"replica-{kind}"] = source, AUTO[kind], "replica.safetensors"
    command = [sys.executable, "-c", SCRIPT, json.dumps(jobs, default=str)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "examples/upstream"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
    assert not done.returncode, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    logits = {name: load_file(folder / name / "logits.safetensors")["logits"] for name in jobs}
    saved = {name: (jobs[name][0], load_file(folder / name / "model.safetensors")) for name in jobs}
    return report, logits, saved


def assert_close(actual, wanted, where):
    actual, wanted = actual.double()[where], wanted.double()[where]
    error = ((actual - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= FP32, f"{error:.1e} of the largest value"


def test_every_key_of_the_published_layout_is_used(native):
    classes = {"masked_lm": "NeoBertForMaskedLM", "classifier": "NeoBertForSequenceClassification"}
    assert native[0] == {f"{place}-{kind}": [classes[kind], {}] for place in ("golden", "replica") for kind in AUTO}


def test_the_golden_checkpoints_give_the_logits_of_the_oracle(native):
    expected, (_, logits, _) = load_file(GOLDEN / "expected.safetensors"), native
    is_real = expected["attention_mask"].bool()
    assert_close(logits["golden-masked_lm"], expected["mlm_logits"], is_real)
    # With padding on the left, EuroBERT and the published code read position 0; ours reads the first real token.
    assert_close(logits["golden-classifier"], expected["classifier_logits"], is_real[:, 0])


def test_a_replica_of_the_published_checkpoint_gives_our_logits(native, checkpoint, classifier_checkpoint):
    """Its feed-forward width of 66 is rounded up to 72."""
    batch = right_padded(96)
    with torch.no_grad():
        masked_lm = NeoBERTForMaskedLM.from_pretrained(checkpoint).eval()(**batch).logits
        classifier = NeoBERTForSequenceClassification.from_pretrained(classifier_checkpoint).eval()(**batch).logits
    assert_close(native[1]["replica-masked_lm"], masked_lm, batch["attention_mask"].bool())
    assert_close(native[1]["replica-classifier"], classifier, slice(None))


def test_saving_writes_the_published_layout_bitwise(native):
    for source, after in native[2].values():
        before = load_file(Path(source) / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
