"""Run transformers' common tests of models (`ModelTesterMixin`) on every class of ours: `make test-transformers`.

Only the source package of transformers contains them. It is downloaded to `.transformers-tests` for the installed version; the
repository has no copy. `SKIPPED` names the tests that do not apply here, with the reason. The tests that the mixin itself skips
need a GPU or concern other kinds of models. Two mixins, export and generation, are not in the source package:
tests/model/test_modeling_neobert.py tests export, and an encoder generates no text.
"""

import importlib
import subprocess
import sys
import tarfile
import types
import unittest
import unittest.mock
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto import modeling_auto

import neobert_hf

FOLDER = Path(__file__).parents[1] / ".transformers-tests" / version("transformers")
COMMON = FOLDER / "tests/test_modeling_common.py"
SKIPPED = {
    "test_sdpa_can_dispatch_non_composite_models": "without attn_implementation the config says 'auto'; the "
    "backend depends on device, dtype, layout and autograd of each forward, and is logged"
}
# These tests load a checkpoint without tensors to test initialisation. The check for a complete encoder is disabled for them.
NEED_AN_EMPTY_CHECKPOINT = {"test_can_init_all_missing_weights", "test_model_weights_reload_no_missing_tied_weights"}


def download() -> None:
    """Download the tests and `parameterized`, which they import."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    release = f"transformers=={version('transformers')}"
    subprocess.run([*pip, "install", "--target", FOLDER, "parameterized"], check=True)
    subprocess.run([*pip, "download", "--no-deps", "--no-binary", "transformers", "-d", FOLDER, release], check=True)
    (archive,) = FOLDER.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as files:
        content = files.extractfile(f"{archive.name.removesuffix('.tar.gz')}/tests/{COMMON.name}").read()
    COMMON.parent.mkdir(exist_ok=True)
    COMMON.write_bytes(content)
    archive.unlink()


def load_common_tests() -> types.ModuleType:
    if not COMMON.is_file():
        download()
    sys.path.append(str(FOLDER))
    package = types.ModuleType("transformers_tests")
    package.__path__ = [str(COMMON.parent)]
    sys.modules[package.__name__] = package
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        missing = types.ModuleType(f"{package.__name__}.{name}")
        setattr(missing, mixin, type(mixin, (), {}))
        sys.modules[missing.__name__] = missing
    return importlib.import_module(f"{package.__name__}.{COMMON.stem}")


common = load_common_tests()

# A test finds the labels of a class in these tables; registration of a class does not change them.
modeling_auto.MODEL_MAPPING_NAMES["neobert"] = neobert_hf.NeoBERTModel.__name__
for task, model_class in {
    "MASKED_LM": neobert_hf.NeoBERTForMaskedLM,
    "SEQUENCE_CLASSIFICATION": neobert_hf.NeoBERTForSequenceClassification,
    "TOKEN_CLASSIFICATION": neobert_hf.NeoBERTForTokenClassification,
    "QUESTION_ANSWERING": neobert_hf.NeoBERTForQuestionAnswering,
    "MULTIPLE_CHOICE": neobert_hf.NeoBERTForMultipleChoice,
}.items():
    getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")["neobert"] = model_class.__name__


class Tester:
    batch_size, seq_length, num_choices = 3, 7, 4
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 4
    is_training = True

    def get_config(self):
        return neobert_hf.NeoBERTConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            max_position_embeddings=64,
        )

    def prepare_config_and_inputs_for_common(self):
        shape = (self.batch_size, self.seq_length)
        ids, mask = common.ids_tensor(shape, self.vocab_size), common.random_attention_mask(shape)
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class CommonModelTest(common.ModelTesterMixin, unittest.TestCase):
    """Every test of the mixin, on every class."""

    all_model_classes = tuple(cls for name, cls in neobert_hf.AUTO_CLASSES.items() if name != "AutoConfig")
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = Tester()
        if reason := SKIPPED.get(self._testMethodName):
            self.skipTest(reason)
        if self._testMethodName in NEED_AN_EMPTY_CHECKPOINT:
            check = unittest.mock.patch("neobert_hf.model.modeling_neobert.check_encoder_is_complete")
            check.start()
            self.addCleanup(check.stop)
