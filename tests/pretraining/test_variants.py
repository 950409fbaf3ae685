"""Models of the user's own in a pretraining, and which of them are refused; examples/variants/tests has the worked variants."""

import json

import pytest
import torch
from alibi import AlibiModel
from geglu import GegluForMaskedLM, GegluModel
from pretraining_runs import run
from transformers import BertForMaskedLM

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
)
from neobert_hf.model import SwiGLU
from neobert_hf.pretraining.arguments import PretrainingArguments
from neobert_hf.pretraining.training import build_model, check_variant

SHAPE = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


def initialize_small(config):
    model = NeoBERTForMaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


@pytest.mark.slow
def test_a_function_makes_the_initial_weights(corpus, tmp_path):
    stock, small = run(corpus, tmp_path / "stock"), run(corpus, tmp_path / "small", initialize_small)
    assert stock[1] != small[1]
    assert "model" not in json.loads((tmp_path / "stock/run.json").read_text())
    assert json.loads((tmp_path / "small/run.json").read_text())["model"] == "test_variants.initialize_small"


def test_another_model_of_transformers_trains_on_padded_rows_as_in_one_large_batch(corpus, tmp_path):
    shape = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=48"
    shape += ",hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
    options = dict(batch_format="padded", config_overrides=shape, max_steps=2, row_tokens=64)
    many = run(corpus, tmp_path / "accumulated", BertForMaskedLM, **options)
    once = run(corpus, tmp_path / "once", BertForMaskedLM, **options, per_device_train_batch_size=4)
    assert many == pytest.approx(once, rel=1e-4) and 3 < many[1] < 8


class WithStockConfig(NeoBERTForMaskedLM):
    """A variant whose folder would load as the stock model."""

    encoder_class = GegluModel


def with_other_layers(config):
    """A stock model whose feed-forward layers its class does not make."""
    model = NeoBERTForMaskedLM(config)
    for block in model.model.transformer_encoder:
        block.ffn = type("Other", (SwiGLU,), {})(config)
    return model


class WithoutName(NeoBERTConfig):
    """A config class that does not set a model_type."""


def subclass(of, **parts):
    return type("Mine", (of,), parts)


@pytest.mark.parametrize(
    "made_by",
    [
        WithStockConfig,
        subclass(NeoBERTForSequenceClassification, encoder_class=GegluModel),
        subclass(NeoBERTForMaskedLM, encoder_class=subclass(NeoBERTModel, forward=lambda self, *ids, **_: None)),
        subclass(NeoBERTModel, ffn_class=GegluModel.ffn_class),
        subclass(NeoBERTModel, attention_class=AlibiModel.attention_class),
        subclass(NeoBERTModel, norm_class=torch.nn.LayerNorm),
        subclass(NeoBERTModel, rotary_table=AlibiModel.rotary_table),
        subclass(NeoBERTModel, embed=lambda self, *inputs: 2 * NeoBERTModel.embed(self, *inputs)),
        subclass(GegluForMaskedLM, config_class=WithoutName),
        subclass(NeoBERTForMultipleChoice, config_class=WithoutName),
        subclass(NeoBERTModel, config_class=WithoutName, forward=lambda self, input_ids: None),
    ],
)
def test_a_variant_with_the_model_type_of_the_stock_model_is_not_saved(made_by, tmp_path):
    model = made_by(made_by.config_class(**SHAPE))
    with pytest.raises(ValueError, match=f"model={made_by.__name__} has the model_type 'neobert', .* give it a c"):
        model.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    stock = NeoBERTForMaskedLM(NeoBERTConfig(**SHAPE))
    stock.model.layer_norm = torch.nn.LayerNorm(SHAPE["hidden_size"])
    with pytest.raises(ValueError, match="has the model_type 'neobert'"):
        stock.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "made_by",
    [
        subclass(NeoBERTForSequenceClassification, forward=lambda self, input_ids: self.model(input_ids)),
        subclass(NeoBERTModel, pooled=lambda self, input_ids: self(input_ids).last_hidden_state.mean(1)),
    ],
)
def test_a_subclass_with_the_stock_encoder_is_saved(made_by, tmp_path):
    model = made_by(made_by.config_class(**SHAPE))
    model.save_pretrained(tmp_path)
    again = made_by.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


Unsaved = type("Unsaved", (GegluForMaskedLM,), {"__module__": "__main__"})


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (WithStockConfig, {}, "model=WithStockConfig has the model_type 'neobert', .* give it a config_class with"),
        (with_other_layers, {}, "model is a NeoBERTForMaskedLM with modules that .* write a subclass that makes"),
        (Unsaved, {}, "model=Unsaved is defined in the script itself, .* define it in another file and import it"),
        (BertForMaskedLM, {}, "model=BertForMaskedLM is no NeoBERT and may not keep packed documents apart; choose"),
        (GegluForMaskedLM, {"architecture": "roberta-prelayernorm", "batch_format": "padded"}, "both given; give one"),
    ],
)
def test_a_model_that_would_not_load_or_would_mix_documents_is_refused(model, changes, words, tokenizer, tmp_path):
    recipe = PretrainingArguments(output_dir=str(tmp_path), use_cpu=True, **changes).to_recipe()
    with pytest.raises(ValueError, match=words) as error:
        made = build_model(recipe, tokenizer, "hidden_size=64,num_hidden_layers=1,num_attention_heads=2", model)
        check_variant(made, recipe)
    assert "\n" not in str(error.value)
