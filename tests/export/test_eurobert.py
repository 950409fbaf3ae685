"""The twin of a model in stock classes of transformers: the numbers of the oracle, and the same bits on the way back."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, change_config, largest_error, run_main
from oracle import CONFIG, Oracle, random_weights, write_checkpoint
from safetensors.torch import load_file, save_file

import neobert_hf
from neobert_cli import commands as neobert_cli
from neobert_hf.checkpoints import SavedModel, eurobert
from neobert_hf.checkpoints.embedding_models import open_embedding_model
from neobert_hf.checkpoints.eurobert import as_eurobert, write_card_of_twin
from neobert_hf.export import export_model, exporting

MINI = Path(neobert_hf.MINI_MODEL_PATH)
FP32 = 1e-5  # largest error over largest value: float32 sums in another order
HAS_EUROBERT = find_spec("transformers.models.eurobert") is not None
pytestmark = pytest.mark.skipif(not HAS_EUROBERT, reason="transformers has EuroBERT since 5.3")
IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 90, 14]])


@pytest.fixture
def tagger(weights, tokenizer, tmp_path):
    folder = write_checkpoint(tmp_path / "saved", weights, "NeoBERTForSequenceClassification")
    change_config(folder, architectures=["NeoBERTForTokenClassification"], torch_dtype="bfloat16")
    change_config(folder, id2label=dict(enumerate("abc")))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor.bfloat16() for name, tensor in tensors.items() if not name.startswith("dense")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.compat
def test_stock_transformers_compute_the_golden_tensors_without_the_package(tmp_path):
    export_model(GOLDEN / "masked_lm", tmp_path / "twin", to="eurobert")
    command = [sys.executable, "-I", GOLDEN.parent / "loads_eurobert.py", tmp_path / "twin"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    errors = json.loads(run.stdout.splitlines()[-1])
    assert errors.keys() == {"padded", "packed"} and max(errors.values()) < FP32
    assert "token_id" not in run.stderr  # no special token is outside the vocabulary


def test_a_tagger_computes_the_logits_of_the_oracle_and_keeps_its_labels_and_dtype(tagger, tmp_path):
    from transformers import AutoModelForTokenClassification

    run_main(neobert_cli, "export", tagger, tmp_path / "twin", "--to", "eurobert")
    stored = load_file(tagger / "model.safetensors")
    assert {tensor.dtype for tensor in load_file(tmp_path / "twin/model.safetensors").values()} == {torch.bfloat16}
    twin = AutoModelForTokenClassification.from_pretrained(tmp_path / "twin", dtype=torch.float64).eval()
    assert type(twin).__module__ == "transformers.models.eurobert.modeling_eurobert"
    assert twin.config.id2label == dict(enumerate("abc"))
    oracle = Oracle({name: tensor.float().numpy() for name, tensor in stored.items()})
    wanted = oracle.linear(oracle.encode(IDS[0].numpy())[2], "classifier") + oracle.weights["classifier.bias"]
    with torch.no_grad():
        assert largest_error(twin(IDS).logits[0], wanted) < 1e-6  # EuroBERT's angles are float32


def test_an_embedding_model_keeps_its_modules_prompts_and_vectors(tmp_path):
    """Dense and weights of words before the pooling, as the mini model has them."""
    from sentence_transformers import SentenceTransformer

    texts, twin = ["Open a file and read its lines.", "sleep"], tmp_path / "twin"
    export_model(MINI, twin, to="eurobert")
    theirs, ours = SentenceTransformer(str(twin), device="cpu"), open_embedding_model(str(MINI), device="cpu")
    assert type(theirs[0].model).__module__ == "transformers.models.eurobert.modeling_eurobert"
    assert largest_error(theirs.encode(texts), ours.encode(texts)) < FP32
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert json.loads((twin / name).read_text()) == json.loads((MINI / name).read_text())
    card = (twin / "README.md").read_text()
    assert "license: mit" in card and "- neobert" in card and "trust_remote_code" not in card


def test_the_card_of_a_model_on_the_hub_names_it_as_the_base(published, tmp_path):
    from huggingface_hub import ModelCard

    export_model(published, tmp_path / "twin", to="eurobert")
    (tmp_path / "twin/README.md").unlink()
    saved = SavedModel(published)
    saved.source = "org/name"
    write_card_of_twin(saved, tmp_path / "twin")
    data = ModelCard.load(tmp_path / "twin/README.md").data
    assert (data.base_model, data.base_model_relation, data.pipeline_tag) == ("org/name", "finetune", "fill-mask")
    assert data.tags == ["neobert", "eurobert"]


def test_an_embedding_model_with_dense_and_normalization_is_exact_and_has_what_vllm_reads(tokenizer, tmp_path):
    """The export compares the states and the vectors; vLLM 0.32.0 reads these names (model_executor/models/transformers)."""
    from sentence_transformers.base.modules import Dense, Normalize

    write_checkpoint(tmp_path / "network", random_weights())
    tokenizer.save_pretrained(tmp_path / "network")
    model = neobert_hf.sentence_transformer(str(tmp_path / "network"), prompts={"query": "fox "})
    model.append(Dense(32, 8))
    model.append(Normalize())
    model.save_pretrained(str(tmp_path / "saved"))
    twin = tmp_path / "twin"
    errors = export_model(tmp_path / "saved", twin, to="eurobert")["files"]["model.safetensors"]["errors"]
    assert max(errors.values()) < FP32
    assert {path.name for path in twin.iterdir()} >= {"1_Pooling", "2_Dense", "modules.json"}
    assert '"query": "fox "' in (twin / "config_sentence_transformers.json").read_text()
    modules = json.loads((twin / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert load_file(twin / "2_Dense/model.safetensors").keys() == {"linear.weight", "linear.bias"}
    config = json.loads((twin / "config.json").read_text())
    assert config["architectures"] == ["EuroBertModel"]  # the ending is the task
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0} and "rope_theta" not in config


EXACT = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn with options": {
        "max_length": 128,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 4, "beta_slow": 2, "attention_factor": 1.5},
    },
    "another base": {"rope_theta": 500.0},
    "padded": {"unpad_inputs": False, "pad_token_id": 3},
    "no padding": {"pad_token_id": None},
    "narrow heads": {"num_attention_heads": 16, "dim_head": 2},
}


@pytest.mark.parametrize("name", EXACT)
def test_what_a_config_may_say_is_exact(name, published, tmp_path):
    """As stock transformers compute it."""
    from transformers import AutoModelForMaskedLM

    change_config(published, **EXACT[name])
    export_model(published, tmp_path / "twin", to="eurobert")
    ours, theirs = (AutoModelForMaskedLM.from_pretrained(tmp_path / part).eval() for part in ("published", "twin"))
    with torch.no_grad():
        assert largest_error(theirs(IDS).logits, ours(IDS).logits) < FP32


def test_a_vocabulary_padded_by_hand_stays_padded(tokenizer, tmp_path):
    config = CONFIG | {"vocab_size": 128}
    folder = write_checkpoint(tmp_path / "saved", random_weights(config=config), config=config)
    tokenizer.save_pretrained(folder)
    export_model(folder, tmp_path / "twin", to="eurobert")
    written = json.loads((tmp_path / "twin/config.json").read_text())
    assert (written["vocab_size"], written["mask_token_id"]) == (128, tokenizer.mask_token_id)


def config_with(**values):
    return lambda folder: change_config(folder, **values)


def another(name, **config):
    def replace(folder):
        shutil.rmtree(folder)
        sizes = dict(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
        model_class = getattr(neobert_hf, f"NeoBERTFor{name}")
        model_class(neobert_hf.NeoBERTConfig(**sizes, **config)).save_pretrained(folder)

    return replace


def saved_by(make):
    def save(folder):
        model = make(str(folder))
        shutil.rmtree(folder)
        model.save_pretrained(str(folder))

    return save


BAD_SOURCES = {  # what is done to the folder of a masked language model, and the words of the error
    "classifier": (another("SequenceClassification"), "has GELU where this one has tanh or none; export to ONNX"),
    "classifier by the mean": (another("SequenceClassification", classifier_pooling="mean"), "export to ONNX"),
    "answers": (another("QuestionAnswering"), "no EuroBERT for question-answering; export to ONNX"),
    "sparse": (saved_by(neobert_hf.sparse_encoder), "has no EuroBERT for sparse-encoder; export to ONNX"),
    "multi-vector": (saved_by(neobert_hf.multi_vector_encoder), "has no EuroBERT for multi-vector; export to ONNX"),
    "dynamic positions": (
        config_with(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope_type='dynamic': EuroBERT scales RoPE by the longest text",
    ),
    "odd heads": (config_with(num_attention_heads=32, dim_head=1), "heads of an even width"),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_model_that_has_no_twin_is_refused_in_one_line_and_nothing_is_written(name, published, tmp_path):
    change, words = BAD_SOURCES[name]
    change(published)
    with pytest.raises((ValueError, OSError), match=words) as caught:
        export_model(published, tmp_path / "out", to="eurobert")
    assert "\n" not in str(caught.value) and [path.name for path in tmp_path.iterdir()] == ["published"]


def test_a_twin_that_differs_from_torch_is_refused_and_nothing_is_left(published, tmp_path, monkeypatch):
    def without_rotation(tensors, num_heads):
        """As a converter writes that takes the rows of all heads as they are."""
        found = as_eurobert(tensors, num_heads)
        return {name: tensor.flip(0) if "q_proj" in name else tensor for name, tensor in found.items()}

    monkeypatch.setattr(eurobert, "as_eurobert", without_rotation)
    with pytest.raises(ValueError, match=r"model\.safetensors differs from torch by"):
        export_model(published, tmp_path / "out", to="eurobert")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_it_is_the_only_format_of_its_folder_and_needs_a_newer_transformers(published, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="export it to a folder of its own"):
        export_model(published, tmp_path / "out", to=["onnx", "eurobert"])
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"has no EuroBERT; install transformers 5\.3"):
        export_model(published, tmp_path / "out", to="eurobert")


@pytest.mark.parametrize("outside", [torch.float32, torch.float16])
def test_weights_of_one_half_dtype_keep_it_and_those_of_several_are_stored_in_float32(published, tmp_path, outside):
    file = next(published.glob("*.safetensors"))
    dtypes = {True: torch.float16, False: outside}
    tensors = {name: x.to(dtypes["transformer_encoder" in name]) for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    export_model(published, tmp_path / "twin", to="eurobert")
    assert {x.dtype for x in load_file(tmp_path / "twin/model.safetensors").values()} == {outside}
