"""A folder is refused in the same words by all that opens it, and says what it holds."""

import shutil

import pytest
import serve
import torch
from conftest import change_config, reranker_of_modules
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

import neobert_hf
from neobert_hf.checkpoints import SavedModel, examine, write_card
from neobert_hf.data import train_wordpiece
from neobert_hf.export import OnnxModel, export_model
from neobert_hf.finetuning import Classifier, QuestionAnswerer, Tagger

LABELS = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}


@pytest.fixture
def sound(tiny_config, tokenizer, tmp_path):
    tiny_config.update(LABELS)
    neobert_hf.NeoBERTForSequenceClassification(tiny_config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config(**values):
    return lambda folder: change_config(folder, **values)


def weights(change):
    def damage(folder):
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return damage


def other_tokenizer(folder):
    train_wordpiece(["the parcel was late and the courier left it open in a file"] * 9, 40, 24).save_pretrained(folder)


def two_sets(folder):
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")


DAMAGE = {  # what happens to the folder, and the words of the error
    "no head": (weights(lambda found: {k: v for k, v in found.items() if k.startswith("model.")}),
     "lacks classifier, dense in the shapes of config.json"),
    "a block too few": (config(num_hidden_layers=1), "gives num_hidden_layers=1, but its weights have 3"),
    "another type": (config(model_type="bert"), "has the model_type 'bert', and its weights are those of a NeoBERT"),
    "two classes": (config(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1}), "lacks classifier in the shapes"),
    "another width": (config(hidden_size=64, dim_head=None), "of the shape (96, 32), where config.json gives (96, 64)"),
    "another tokenizer": (other_tokenizer, "give the tokenizer of this model"),
    "NaN": (weights(lambda found: found | {"classifier.bias": found["classifier.bias"] * torch.nan}),
     "has NaN or infinity in classifier.bias"),
    "two sets": (two_sets, "holds two sets of weights, model.safetensors and model-00001-of-00002.safetensors"),
}  # fmt: skip


def words_of(function, *arguments):
    with pytest.raises((ValueError, OSError)) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", DAMAGE)
def test_all_that_opens_a_folder_refuses_it_in_the_same_words(sound, name):
    damage, words = DAMAGE[name]
    Classifier(str(sound), verbose=False).predict(["the fox"])
    damage(sound)
    found = {
        words_of(Classifier(str(sound), verbose=False).predict, ["the fox"]),
        words_of(serve.open_folder, sound, None, None, 1),
        words_of(export_model, sound, sound.with_name("out")),
    }
    (message,) = found
    assert words in message
    (finding, *_) = examine(sound)["findings"]
    assert finding["code"] == "refused" and f"{finding['meaning']}; {finding['mend']}" == message


@pytest.mark.parametrize("job", [Classifier, Tagger, QuestionAnswerer])
def test_a_start_without_a_head_opens_and_an_export_is_named_as_one(sound, job, tmp_path):
    DAMAGE["no head"][0](sound)
    assert job(str(sound), verbose=False).tokenizer
    (tmp_path / "exported/onnx").mkdir(parents=True)
    (tmp_path / "exported/onnx/model.onnx").touch()
    for open_it in (lambda folder: job(folder, verbose=False).tokenizer, neobert_hf.sentence_transformer, write_card):
        assert "is an export of a model (onnx/model.onnx)" in words_of(open_it, str(tmp_path / "exported"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_an_exported_folder_that_lacks_a_file_is_refused_by_its_name(name, tmp_path):
    for file in ("onnx/model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    (tmp_path / name).unlink()
    for open_it in (OnnxModel, serve.open_folder):
        assert f"lacks {name}, which `neobert export` writes" in words_of(open_it, tmp_path)


@pytest.mark.parametrize("model_class", [BertForSequenceClassification, BertForTokenClassification])
def test_the_head_of_another_network_is_judged_too(model_class, tokenizer, tmp_path):
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    model_class(BertConfig(vocab_size=len(tokenizer), **sizes, **LABELS)).save_pretrained(tmp_path)
    SavedModel(tmp_path).check().check_head()
    weights(lambda found: {k: v for k, v in found.items() if not k.startswith("classifier")})(tmp_path)
    assert "lacks a layer of its outputs" in words_of(SavedModel(tmp_path).check().check_head)


def test_a_folder_says_what_it_holds(folder, sound, tmp_path):
    import sentence_transformers as st

    def kind_of(model):
        model.save_pretrained(str(tmp_path / "saved"))
        saved = SavedModel(tmp_path / "saved").check()
        found = saved.kind, saved.library
        shutil.rmtree(tmp_path / "saved")
        return found

    dense = neobert_hf.sentence_transformer(folder)
    assert kind_of(dense) == ("vector", "SentenceTransformer")
    assert kind_of(neobert_hf.sparse_encoder(folder)) == ("sparse", "SparseEncoder")
    assert kind_of(neobert_hf.multi_vector_encoder(folder)) == ("multi-vector", "MultiVectorEncoder")
    assert kind_of(st.CrossEncoder(folder, num_labels=1)) == ("score", "CrossEncoder")
    assert kind_of(st.CrossEncoder(folder, num_labels=3)) == ("classes", "CrossEncoder")
    assert kind_of(reranker_of_modules(folder)) == ("score", "CrossEncoder")
    found = SavedModel(sound)
    assert (found.kind, found.labels, found.problem_type) == ("classes", ["a", "b", "c"], "single_label_classification")
    assert SavedModel(folder).kind == "masked words" and SavedModel(neobert_hf.MINI_MODEL_PATH).kind == "vector"
