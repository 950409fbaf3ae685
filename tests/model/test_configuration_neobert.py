"""The configuration reads the published file, writes a file that transformers 5 accepts, and refuses invalid values."""

import copy
import json

import pytest
from transformers import AutoConfig

from neobert_hf import NeoBERTConfig

pytestmark = pytest.mark.compat

PUBLISHED_DEFAULTS = dict(vocab_size=30522, hidden_size=768, num_hidden_layers=28, num_attention_heads=12)
PUBLISHED_DEFAULTS |= dict(intermediate_size=3072, max_position_embeddings=4096, norm_eps=1e-5, pad_token_id=0)
PUBLISHED_DEFAULTS |= dict(rope_theta=10000.0, swiglu_width=2048, head_dim=64)
PUBLISHED_DEFAULTS |= dict.fromkeys(("embedding_init_range", "decoder_init_range", "classifier_init_range"), 0.02)


def test_defaults_are_the_published_model():
    config = NeoBERTConfig()
    assert {name: getattr(config, name) for name in PUBLISHED_DEFAULTS} == PUBLISHED_DEFAULTS


def test_the_published_config_is_read_without_its_accidental_keys(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint)
    assert type(config) is NeoBERTConfig
    assert config.max_position_embeddings == config.max_length == 64
    assert not {"kwargs", "trust_remote_code", "pretrained_model_name_or_path"} & set(config.to_dict())


def test_a_saved_config_has_max_position_embeddings_and_no_max_length(checkpoint, tmp_path):
    config = AutoConfig.from_pretrained(checkpoint, norm_eps=1e-4, classifier_dropout=0.3, sparse_prediction=True)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["max_position_embeddings"] == 64
    assert not {"max_length", "kwargs", "trust_remote_code"} & set(saved)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.max_length == 64
    # the size is saved without rounding: 108 in place of 100, both for the width 72
    assert (config.intermediate_size, again.intermediate_size, config.swiglu_width) == (100, 108, 72)
    names = [name for name in PUBLISHED_DEFAULTS if name != "intermediate_size"]
    for name in (*names, "classifier_dropout", "sparse_prediction", "unpad_inputs", "rope_parameters"):
        assert getattr(again, name) == getattr(config, name), name
    assert (again.norm_eps, again.classifier_dropout, again.sparse_prediction) == (1e-4, 0.3, True)


def test_overrides_are_applied_and_checked(checkpoint, tmp_path):
    assert AutoConfig.from_pretrained(checkpoint, max_position_embeddings=128).max_position_embeddings == 128
    assert AutoConfig.from_pretrained(checkpoint, rope_theta=500.0).rope_theta == 500.0
    saved = tmp_path / "saved"
    AutoConfig.from_pretrained(checkpoint).save_pretrained(saved)
    assert AutoConfig.from_pretrained(saved, max_length=128).max_position_embeddings == 128
    linear = {"type": "linear", "factor": 2.0}
    assert AutoConfig.from_pretrained(saved, rope_scaling=linear).rope_parameters["rope_type"] == "linear"
    rope = {"rope_type": "yarn", "factor": 4.0, "beta_fast": None}
    yarn = AutoConfig.from_pretrained(saved, max_position_embeddings=256, rope_parameters=rope)
    assert yarn.rope_parameters["original_max_position_embeddings"] == 64
    yarn.save_pretrained(tmp_path / "yarn")
    for scaling, kind in ((linear, "linear"), ({"rope_type": "default"}, "default")):
        assert AutoConfig.from_pretrained(tmp_path / "yarn", rope_scaling=scaling).rope_parameters["rope_type"] == kind
    with pytest.raises(ValueError, match="hidden_size=33 is not divisible"):
        AutoConfig.from_pretrained(checkpoint, hidden_size=33)


BASE, LENGTH = {"rope_theta": 160_000.0}, {"max_length": 64}
LINEAR, YARN = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}
STORED = {  # settings of RoPE in config.json, in every format
    "base": BASE,
    "base and scaling of transformers 4": {**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "base of transformers 5": {"rope_parameters": {"rope_type": "default", **BASE}},
    "scaling of transformers 5": {"rope_parameters": {**LINEAR, **BASE}},
    "all in the scaling of transformers 4": {"rope_scaling": {**LINEAR, **BASE}},
}
OWN_LENGTH = {"original_max_position_embeddings": 32}
OVERRIDES = {  # a scaling, and what it becomes
    "the base of the training": ({"rope_type": "default"}, {"rope_type": "default", **BASE}),
    "base and length of the training": (YARN, {**YARN, **BASE, "original_max_position_embeddings": 64}),
    "its own base": ({"rope_type": "default", "rope_theta": 500.0},) * 2,
    "its own length": ({**YARN, **OWN_LENGTH}, {**YARN, **BASE, **OWN_LENGTH}),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("keeps", OVERRIDES)
@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_a_scaling_replaces_the_stored_one_and_keeps(stored, keeps, section):
    given, wanted = OVERRIDES[keeps]
    content = {**LENGTH, **STORED[stored]}
    before = copy.deepcopy((content, given))
    assert NeoBERTConfig.from_dict(content, **{section: given}).rope_parameters == wanted
    assert (content, given) == before


@pytest.mark.parametrize("stored", STORED)
def test_without_a_scaling_the_stored_one_stays(stored):
    content = {**LENGTH, **STORED[stored]}
    config = NeoBERTConfig.from_dict(content, rope_parameters=None, norm_eps=0.1)
    assert config.rope_parameters == NeoBERTConfig(**content).rope_parameters and config.norm_eps == 0.1
    assert config.rope_theta == 160_000.0


def test_a_base_that_is_given_in_one_format_holds_for_a_scaling_in_the_other():
    given = dict(rope_parameters={"rope_theta": 500.0}, rope_scaling={"type": "linear", "factor": 2.0})
    for config in (NeoBERTConfig(**given), NeoBERTConfig.from_dict(dict(BASE), **given)):
        assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ],
)
def test_rope_is_read_in_the_formats_of_transformers_4_and_5(form):
    config = NeoBERTConfig(**form)
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    again = NeoBERTConfig.from_dict(config.to_dict())
    assert again.rope_parameters == config.rope_parameters


REFUSED = {
    "a width that no head divides": (dict(hidden_size=770), "hidden_size=770 is not divisible by num_at"),
    "odd heads": (dict(hidden_size=36), "heads of an even width, whose pairs RoPE rotates"),
    "no layers": (dict(num_hidden_layers=0), "num_hidden_layers=0 must be a positive integer"),
    "no context": (dict(max_position_embeddings=0), "max_position_embeddings=0 must be a positive integer"),
    "a head width that disagrees": (dict(dim_head=32), "dim_head=32 disagrees"),
    "the same under the name of other libraries": (dict(head_dim=32), "dim_head=32 disagrees"),
    "padding outside": (dict(pad_token_id=99, vocab_size=50), "pad_token_id=99 must be .* vocab_size - 1 = 49"),
    "epsilon zero": (dict(norm_eps=0.0), "norm_eps=0.0 must be a positive number"),
    "dropout": (dict(classifier_dropout=1.0), "classifier_dropout=1.0 must be a number of at least 0 and below 1"),
    "an unknown pooling": (dict(classifier_pooling="max"), "classifier_pooling='max' must be 'cls' or 'mean'"),
    "a tied decoder": (dict(tie_word_embeddings=True), "write them out: neobert convert SRC DST"),
    "another activation": (dict(hidden_act="gelu"), "hidden_act='gelu' must be swiglu"),
    "no rotation": (dict(rope=False), "rope=False must be true"),
    "another norm": (dict(rms_norm=False), "rms_norm=False must be true"),
    "nGPT": (dict(ngpt=True), "ngpt=True must be false"),
    "another model type": (dict(model_type="bert"), "this is a bert, not a NeoBERT"),
    "NeoDictaBERT": (dict(encoder_init_range=0.02), "NeoDictaBERT checkpoint .* rotates halves instead of pairs"),
    "unknown rope": (dict(rope_scaling={"rope_type": "llama3"}), "rope_type='llama3' .* must be one of default"),
    "rope of a list": (dict(rope_parameters={"rope_type": ["linear"]}), "rope_type=.* must be one of default"),
    "rope without factor": (dict(rope_scaling={"rope_type": "linear"}), "needs factor"),
    "rope with an unknown key": (dict(rope_parameters={"factor": 2.0}), "'default' does not accept factor"),
    "a small factor": (dict(rope_scaling={"rope_type": "linear", "factor": 0.5}), "factor=0.5 .* at least 1"),
    "a factor of text": (dict(rope_scaling={"rope_type": "linear", "factor": "2"}), "factor='2' in rope_"),
    "theta zero": (dict(rope_theta=0), "rope_theta=0 must be a positive number"),
    "theta 0": (dict(rope_parameters={"rope_theta": 0}), "rope_theta=0 in rope_parameters must be a positive number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_would_give_wrong_numbers_is_refused(name):
    values, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        NeoBERTConfig(**values)
    with pytest.raises(ValueError, match=message):
        NeoBERTConfig.from_dict(values)


NONE = type(None)
TYPES = {  # of the value of each key
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_labels"), (int,)),
    **dict.fromkeys(("max_position_embeddings", "max_length", "dim_head", "pad_token_id"), (int, NONE)),
    **dict.fromkeys(("unpad_inputs", "sparse_prediction", "tie_word_embeddings"), (bool,)),
    **dict.fromkeys(("output_hidden_states", "output_attentions", "return_dict"), (bool, NONE)),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "id2label", "label2id", "quantization_config"), (dict, NONE)),
    **dict.fromkeys(("norm_eps", "classifier_dropout"), (int, float)),
    "intermediate_size": (int,),
    "classifier_pooling": (),  # two texts only
    "rope_theta": (int, float, NONE),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_key(tmp_path, name):
    """JSON can hold a text or null where a number belongs; a text is true where a flag belongs."""
    values = ["no", "1e-5", None, 0, 1.5, True, [1], {"a": 1}]
    refused = [value for value in values if type(value) not in TYPES[name]]
    if int in TYPES[name]:
        refused += [-1, float("nan"), float("inf")]
    for value in refused:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "neobert", name: value}))
        with pytest.raises(ValueError, match=f"^{name}=.* must be "):
            AutoConfig.from_pretrained(tmp_path)
