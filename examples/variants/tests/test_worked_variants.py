"""The worked variants compute what a plain reference computes, train, resume, and load from their own code."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import train_variant
from alibi import AlibiForMaskedLM
from conftest import run_main
from geglu import GegluConfig, GegluForSequenceClassification, GegluModel
from layer_norm import LayerNormForMaskedLM
from no_positions import NoPositionsForMaskedLM
from pretraining_runs import command, run
from train_variant import VARIANTS
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel, inference_copy

SHAPE = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
DOCUMENTS = [torch.tensor(ids) for ids in ([7, 9, 5, 31, 8, 8, 2], [3], [12, 30, 7, 7, 21])]
EVERY_VARIANT = pytest.mark.parametrize("name", VARIANTS)


def make(name, dtype=torch.float32, **config):
    """A variant whose weights, norms included, are far from their initial values."""
    torch.manual_seed(0)
    model = VARIANTS[name](VARIANTS[name].config_class(**SHAPE, **config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


def reference(weights, name, ids, exponent=8.0):
    """Logits (L, V) of one document from explicit sums, without any code of the package."""

    def norm(x, prefix):
        if name == "layer_norm":
            centred = x - x.mean(-1, keepdim=True)
            scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            return scaled * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"]
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{prefix}.weight"]

    def rotate(x_LK):
        if name in ("alibi", "no_positions"):
            return x_LK
        pairs = torch.arange(4, dtype=torch.float64)
        angles = torch.arange(len(ids))[:, None] * 10000.0 ** (-2 * pairs / 8)
        even, odd = x_LK[:, ::2], x_LK[:, 1::2]
        turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
        return torch.stack(turned, -1).flatten(1)

    columns = torch.arange(len(ids))
    x = weights["model.encoder.weight"][ids]
    if "model.positions.weight" in weights:
        x = x + weights["model.positions.weight"][columns]
    for block in ("model.transformer_encoder.0", "model.transformer_encoder.1"):
        qkv = (norm(x, f"{block}.attention_norm") @ weights[f"{block}.qkv.weight"].T).view(len(ids), 4, 3, 8)
        heads = []
        for h in range(4):
            q, k, v = qkv[:, h].unbind(1)
            scores = rotate(q) @ rotate(k).T / 8**0.5
            if name == "alibi":
                scores = scores - 2 ** (-exponent * (h + 1) / 4) * (columns[:, None] - columns).abs()
            exponentials = (scores - scores.max(-1, keepdim=True).values).exp()
            heads.append(exponentials / exponentials.sum(-1, keepdim=True) @ v)
        x = x + torch.cat(heads, 1) @ weights[f"{block}.wo.weight"].T
        gate, up = (norm(x, f"{block}.ffn_norm") @ weights[f"{block}.ffn.w12.weight"].T).chunk(2, -1)
        gate = gate * (1 + (gate / 2**0.5).erf()) / 2 if name == "geglu" else gate * gate.sigmoid()
        x = x + (gate * up) @ weights[f"{block}.ffn.w3.weight"].T
    return norm(x, "model.layer_norm") @ weights["decoder.weight"].T + weights["decoder.bias"]


def expected_logits(model, name, **options):
    """The reference's logits of all documents, one after the other, (T, V) in float64, and its weights."""
    weights = {key: x.detach().double().requires_grad_() for key, x in model.named_parameters()}
    return torch.cat([reference(weights, name, ids, **options) for ids in DOCUMENTS]), weights


def padded(model, **options):
    """Logits of the real tokens (T, V) of padded rows; padding is on the right, on the left, and on both sides."""
    ids, mask = torch.zeros(2, len(DOCUMENTS), 7, dtype=torch.long)
    for row, (start, document) in enumerate(zip((0, 6, 1), DOCUMENTS)):
        ids[row, start : start + len(document)], mask[row, start : start + len(document)] = document, 1
    return model(ids, mask, **options).logits[mask.bool()]


def packed(model):
    positions = torch.cat([torch.arange(len(ids)) for ids in DOCUMENTS])
    return model(torch.cat(DOCUMENTS)[None], position_ids=positions[None]).logits[0]


def trusted(model):
    """Logits (T, V) of the documents in one row with boundaries, as the collator of a pretraining gives them."""
    boundaries = torch.tensor([0, *map(len, DOCUMENTS)]).cumsum(0).int()
    row = torch.cat(DOCUMENTS)[None]
    return model(row, cu_seq_lens_q=boundaries, max_length_q=7, trust_boundaries=True).logits[0]


FORWARDS = pytest.mark.parametrize("forward", [padded, packed, trusted])


@EVERY_VARIANT
@FORWARDS
def test_values_and_gradients_of_training_are_those_of_the_reference(name, forward):
    model = make(name, torch.float64).train()
    expected, weights = expected_logits(model, name)
    weighting = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    logits = forward(model)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)
    (logits * weighting).sum().backward()
    (expected * weighting).sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[key].grad, atol=1e-9, rtol=1e-9, msg=key)


SWITCHES = {  # of evaluation, each with what changes the path
    "fast kernels": lambda model: model,
    "padding is computed": lambda model: setattr(model.config, "unpad_inputs", False) or model,
    "eager attention": lambda model: setattr(model.config, "_attn_implementation", "eager") or model,
    "inference copy": inference_copy,
}


@EVERY_VARIANT
@FORWARDS
@pytest.mark.parametrize("switch", SWITCHES)
def test_values_of_inference_are_those_of_the_reference(name, forward, switch):
    """float32, in which the kernels of a stock model run."""
    model = SWITCHES[switch](make(name).eval())
    expected, _ = expected_logits(make(name), name)
    with torch.inference_mode():
        torch.testing.assert_close(forward(model).double(), expected, atol=2e-4, rtol=1e-4)


@EVERY_VARIANT
def test_bfloat16_has_at_most_three_times_the_error_of_a_plain_bfloat16_forward(name):
    model = make(name).to(torch.bfloat16).float()
    expected, _ = expected_logits(model, name)
    model = model.to(torch.bfloat16).eval()
    plain = (packed(model).double() - expected).abs().max()
    with torch.inference_mode():
        assert (packed(model).double() - expected).abs().max() <= 3 * plain
        assert (packed(inference_copy(model)).double() - expected).abs().max() <= 3 * plain


def test_a_field_of_the_config_changes_the_values():
    model = make("alibi", torch.float64, alibi_exponent=4.0)
    expected, _ = expected_logits(model, "alibi", exponent=4.0)
    torch.testing.assert_close(packed(model), expected, atol=1e-10, rtol=1e-10)


class WithPositionsModel(NeoBERTModel):
    def __init__(self, config):
        super().__init__(config)
        self.positions = torch.nn.Embedding(7, config.hidden_size)

    def embed(self, tokens, layout):
        return super().embed(tokens, layout) + self.positions(layout.position_ids)


@FORWARDS
def test_positions_that_are_added_to_the_embeddings_are_those_of_each_document(forward):
    class WithPositionsForMaskedLM(NeoBERTForMaskedLM):
        encoder_class = WithPositionsModel

    torch.manual_seed(0)
    model = WithPositionsForMaskedLM(NeoBERTConfig(**SHAPE, decoder_init_range=0.3, embedding_init_range=1)).double()
    torch.testing.assert_close(forward(model), expected_logits(model, "stock")[0], atol=1e-10, rtol=1e-10)


def test_attention_without_probabilities_refuses_to_return_them():
    with pytest.raises(ValueError, match="AlibiAttention returns no probabilities; omit output_attentions"):
        padded(make("alibi"), output_attentions=True)


@EVERY_VARIANT
def test_a_compiled_variant_computes_the_values_of_the_reference(name):
    model = make(name).eval()
    expected, _ = expected_logits(model, name)
    with torch.no_grad():
        found = padded(torch.compile(model, fullgraph=True, backend="eager"))
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)


def set_back(folder, step):
    """Remove what a run wrote after a checkpoint, as if it had been killed."""
    for path in (*folder.glob("checkpoint-*"), *folder.glob("*.safetensors"), folder / "training_summary.json"):
        if path.name != f"checkpoint-{step}":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_run_resumes_bitwise_and_only_with_its_model(corpus, tmp_path):
    overrides = "hidden_size=64,num_hidden_layers=2,num_attention_heads=2,intermediate_size=96,alibi_exponent=4"
    options = dict(max_steps=8, config_overrides=overrides)
    whole = run(corpus, tmp_path, AlibiForMaskedLM, **options)
    assert whole[8] < whole[1]
    set_back(tmp_path, step=4)
    refusal = "belongs to another run:.* model was alibi.AlibiForMaskedLM and is no_positions.NoPositionsForMaskedLM"
    with pytest.raises(ValueError, match=refusal):
        other = options | {"config_overrides": overrides.replace(",alibi_exponent=4", "")}
        run(corpus, tmp_path, NoPositionsForMaskedLM, **other, resume_from_checkpoint="last")
    assert run(corpus, tmp_path, AlibiForMaskedLM, **options, resume_from_checkpoint="last") == whole
    summary = json.loads((tmp_path / "training_summary.json").read_text())
    assert summary["model"] == "alibi.AlibiForMaskedLM" and summary["config"]["alibi_exponent"] == 4
    assert AlibiForMaskedLM.from_pretrained(tmp_path).config.alibi_exponent == 4


def of_a_function(config):
    return NeoBERTForMaskedLM(config)


def test_a_variant_continues_in_phase_2_and_its_folder_needs_its_class(corpus, tmp_path):
    first = run(corpus, tmp_path / "one", LayerNormForMaskedLM)
    options = dict(phase=2, init_from=tmp_path / "one", warmup_steps=None, config_overrides=None)
    options |= dict(max_steps=6, max_length=64, longer_than=[24, 40])
    second = run(corpus, tmp_path / "two", LayerNormForMaskedLM, **options)
    assert second[1] < first[1] - 0.5
    for model, words in {
        None: "holds a layer_norm_neobert, whose class is not known here; give it as model=",
        of_a_function: "is a function, which makes new weights; phase 2 needs a class",
    }.items():
        with pytest.raises(ValueError, match=words):
            run(corpus, tmp_path / "three", model, **options)
    assert not (tmp_path / "three").exists()


def test_the_command_trains_the_variant_that_it_names(corpus, tmp_path):
    run_main(train_variant, "--variant", "geglu", *command(corpus, tmp_path / "run", max_steps=2))
    assert json.loads((tmp_path / "run/run.json").read_text())["model"] == "geglu.GegluForMaskedLM"


LOAD = """
import json, sys
sys.modules["neobert_hf"] = None
import torch
from transformers import AutoModelForMaskedLM
for folder in sys.argv[1:]:
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    model.save_pretrained(folder + "-again")
    again = AutoModelForMaskedLM.from_pretrained(folder + "-again", trust_remote_code=True)
    assert type(again).__module__.startswith("transformers_modules.")
    with torch.inference_mode():
        logits = [each.eval()(torch.tensor([[7, 9, 5, 31]])).logits for each in (model, again)]
    assert torch.equal(*logits)
    print(json.dumps([type(model).__name__, model.config.to_dict().get("alibi_exponent"), logits[0].tolist()]))
"""


@pytest.mark.slow
def test_saved_folders_load_without_the_package_and_without_the_file_of_the_variant(tmp_path):
    """In a clean process, which also saves them again by the code of the folder."""
    models = {name: make(name, **({"alibi_exponent": 6.0} if name == "alibi" else {})).eval() for name in VARIANTS}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in VARIANTS]
    done = subprocess.run([sys.executable, "-I", "-c", LOAD, *folders], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]  # packages may print others
    for (name, model), line in zip(models.items(), lines, strict=True):
        class_name, exponent, logits = json.loads(line)
        assert class_name == VARIANTS[name].__name__ and exponent == (6.0 if name == "alibi" else None)
        with torch.inference_mode():
            expected = model(torch.tensor([[7, 9, 5, 31]])).logits
        torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-5, rtol=1e-5)


def test_a_saved_folder_names_the_classes_of_its_file_and_imports_nothing_of_the_package(tmp_path):
    make("geglu").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GegluForMaskedLM"] and config["auto_map"] == {
        "AutoConfig": "geglu.GegluConfig",
        "AutoModel": "geglu.GegluModel",
        "AutoModelForMaskedLM": "geglu.GegluForMaskedLM",
        "AutoModelForSequenceClassification": "geglu.GegluForSequenceClassification",
    }
    assert "neobert_hf" not in (tmp_path / "geglu.py").read_text()
    assert len(list(tmp_path.glob("*_neobert.py"))) == 16


@pytest.fixture
def unregistered(monkeypatch):
    """Auto classes without the classes that other tests, and the snippets of the page, have registered."""
    for mapping in (CONFIG_MAPPING, AutoModelForSequenceClassification._model_mapping):
        known = {key: x for key, x in mapping._extra_content.items() if key not in ("geglu_neobert", GegluConfig)}
        monkeypatch.setattr(mapping, "_extra_content", known)


@pytest.mark.usefixtures("unregistered")
def test_a_process_with_the_package_never_loads_a_variant_as_the_stock_model(tmp_path):
    make("geglu").save_pretrained(tmp_path / "folder")
    folder = str(tmp_path / "folder")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False)
    with pytest.raises(ValueError, match="model_type='geglu_neobert': this is a geglu_neobert, not a NeoBERT"):
        NeoBERTForMaskedLM.from_pretrained(folder)
    AutoConfig.register(GegluConfig.model_type, GegluConfig)
    AutoModelForSequenceClassification.register(GegluConfig, GegluForSequenceClassification)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert type(classifier) is GegluForSequenceClassification and classifier.new_layers == {"dense", "classifier"}
    assert type(classifier.model) is GegluModel
