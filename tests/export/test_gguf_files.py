"""The GGUF file against the checkpoint, and llama.cpp's results against the oracle's."""

import json
import shutil

import numpy as np
import pytest
from oracle import CONFIG, write_checkpoint
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from neobert_hf.export.gguf import write_gguf

gguf = pytest.importorskip("gguf")

LABELS = ["bad", "good", "so so"]
BLOCK_TENSORS = {
    "qkv": "attn_qkv",
    "wo": "attn_output",
    "ffn.w12": "ffn_up",
    "ffn.w3": "ffn_down",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}
OTHER_TENSORS = {
    "model.encoder.weight": "token_embd.weight",
    "model.layer_norm.weight": "enc.output_norm.weight",
    "dense.weight": "cls.weight",
    "dense.bias": "cls.bias",
    "classifier.weight": "cls.output.weight",
    "classifier.bias": "cls.output.bias",
}


@pytest.fixture
def encoder(tmp_path, checkpoint, tokenizer):
    """The tiny masked language model with its tokenizer."""
    shutil.copytree(checkpoint, tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def write_classifier(folder, weights, tokenizer, names=LABELS, **config):
    """A classifier with the first labels of the random weights."""
    head = {name: weights[name][: len(names)] for name in ("classifier.weight", "classifier.bias")}
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    write_checkpoint(folder, weights | head, "NeoBERTForSequenceClassification", **labels, **config)
    tokenizer.save_pretrained(folder)
    return folder


def add_modules(folder, *kinds, **pooling):
    """Make an embedding model of a folder, in the form of older versions of sentence-transformers."""
    entries = [{"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def change_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tokenizer(folder, change):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))


def read_back(file):
    """Settings; tensors, with quantized numbers times their scales; and the types of the tensors."""
    reader = gguf.GGUFReader(file)
    settings = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    return settings, tensors, {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}


def expected_tensors(weights):
    """The tensors of a classifier as llama.cpp reads them: all queries first, then all keys, then all values."""
    heads, width = CONFIG["num_attention_heads"], CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    expected = {name: weights[ours] for ours, name in OTHER_TENSORS.items()}
    for i in range(CONFIG["num_hidden_layers"]):
        for ours, name in BLOCK_TENSORS.items():
            values = weights[f"model.transformer_encoder.{i}.{ours}.weight"]
            if ours == "qkv":
                parts = [[3 * head + part for head in range(heads)] for part in range(3)]
                values = np.concatenate([values[width * k : width * (k + 1)] for part in parts for k in part])
            expected[f"blk.{i}.{name}.weight"] = values
    return expected


def test_f32_file_holds_the_numbers_of_the_checkpoint(tmp_path, weights, tokenizer):
    write_gguf(write_classifier(tmp_path / "model", weights, tokenizer), tmp_path / "model.gguf")
    _, tensors, _ = read_back(tmp_path / "model.gguf")
    expected = expected_tensors(weights)
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], values, err_msg=name)


def test_file_describes_the_model(tmp_path, encoder):
    change_config(encoder, rope_theta=5000.0)
    write_gguf(encoder, tmp_path / "model.gguf")
    settings, tensors, _ = read_back(tmp_path / "model.gguf")
    assert not any(name.startswith("cls") for name in tensors)
    assert settings["general.architecture"] == "neo-bert"
    described = {
        name.removeprefix("neo-bert."): value for name, value in settings.items() if name.startswith("neo-bert.")
    }
    assert described == {
        "block_count": 3,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 72,  # not 66, two thirds of intermediate_size
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "attention.causal": False,
        "rope.freq_base": 5000.0,
        "rope.scaling.type": "none",
        "pooling_type": gguf.PoolingType.MEAN,
    }


# Largest error by the largest number: half a step of f16; half of 1/127, and the rounding of the scale, which is f16.
@pytest.mark.parametrize("number_type, step", [("f16", 2**-11), ("q8_0", 1 / 254 + 2**-11)])
def test_smaller_types_round_the_matrices_only(tmp_path, weights, tokenizer, number_type, step):
    write_gguf(write_classifier(tmp_path / "model", weights, tokenizer), tmp_path / "model.gguf", number_type)
    _, tensors, types = read_back(tmp_path / "model.gguf")
    for name, values in expected_tensors(weights).items():
        is_matrix, is_narrow = values.ndim == 2, values.shape[-1] % 32 != 0  # of blk.*.ffn_down: 72 numbers
        assert types[name] == ("F32" if not is_matrix else "F16" if is_narrow else number_type.upper())
        bound = np.abs(values).max() * step if is_matrix else 0
        np.testing.assert_allclose(tensors[name], values, rtol=0, atol=bound, err_msg=name)


def test_vocabulary_marks_the_beginnings_of_words(tmp_path, encoder, tokenizer):
    write_gguf(encoder, tmp_path / "model.gguf")
    settings = {
        name.removeprefix("tokenizer.ggml."): value for name, value in read_back(tmp_path / "model.gguf")[0].items()
    }
    texts, vocab = settings["tokens"], tokenizer.get_vocab()
    assert settings["model"] == "bert"
    assert len(texts) == len(set(texts)) == CONFIG["vocab_size"]  # llama.cpp ends its process at a repeated token
    assert texts[vocab["fox"]] == "\u2581fox" and texts[vocab["##ox"]] == "ox" and texts[vocab["[CLS]"]] == "[CLS]"
    special = {id for id, kind in enumerate(settings["token_type"]) if kind == gguf.TokenType.CONTROL}
    assert special == {vocab[f"[{name}]"] for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    ids = ("padding", "unknown", "bos", "eos", "seperator", "mask")  # the spelling of the format
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[SEP]", "[MASK]")
    assert [settings[f"{name}_token_id"] for name in ids] == [vocab[name] for name in names]
    assert (settings["normalizer.lowercase"], settings["normalizer.strip_accents"]) == (True, True)


def test_embeddings_without_a_token_are_unused(tmp_path, encoder, tokenizer):
    vocab = tokenizer.get_vocab()
    last = max(vocab, key=vocab.get)
    file = encoder / "tokenizer.json"
    content = json.loads(file.read_text())
    del content["model"]["vocab"][last]
    file.write_text(json.dumps(content))
    write_gguf(encoder, tmp_path / "model.gguf")
    settings, tensors, _ = read_back(tmp_path / "model.gguf")
    assert len(settings["tokenizer.ggml.tokens"]) == len(tensors["token_embd.weight"]) == CONFIG["vocab_size"]
    assert settings["tokenizer.ggml.token_type"][-1] == gguf.TokenType.UNUSED


@pytest.mark.parametrize(
    "pooling, expected",
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "MEAN"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "CLS"),
        ({"pooling_mode": "lasttoken"}, "LAST"),
    ],
)
def test_file_pools_as_the_embedding_model(tmp_path, encoder, pooling, expected):
    add_modules(encoder, "Transformer", "Pooling", "Normalize", **pooling)
    write_gguf(encoder, tmp_path / "model.gguf")
    assert read_back(tmp_path / "model.gguf")[0]["neo-bert.pooling_type"] == gguf.PoolingType[expected]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("names", [["LABEL_0"], ["LABEL_0", "LABEL_1"], LABELS])
def test_classifier_keeps_its_labels_and_its_pooling(tmp_path, weights, tokenizer, names, pooling):
    folder = write_classifier(tmp_path / "model", weights, tokenizer, names, classifier_pooling=pooling)
    write_gguf(folder, tmp_path / "model.gguf")
    settings, tensors, _ = read_back(tmp_path / "model.gguf")
    assert settings["neo-bert.pooling_type"] == gguf.PoolingType.RANK
    assert settings["neo-bert.classifier.pooling_type"] == gguf.PoolingType[pooling.upper()]
    assert settings["neo-bert.classifier.output_labels"] == names
    assert tensors["cls.output.weight"].shape == (len(names), CONFIG["hidden_size"])


def cased(tokenizer):
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)


def without_chinese(tokenizer):
    tokenizer.normalizer = normalizers.BertNormalizer(handle_chinese_chars=False)


def by_spaces(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


@pytest.mark.parametrize(
    "change, fault",
    [
        (
            lambda folder: change_config(folder, architectures=["NeoBERTForTokenClassification"]),
            "no head for NeoBERTForTokenC",
        ),
        (
            lambda folder: change_config(folder, architectures=["NeoBERTForQuestionAnswering"]),
            "no head for NeoBERTForQuestionA",
        ),
        (
            lambda folder: change_config(folder, rope_scaling={"rope_type": "linear", "factor": 2.0}),
            "rope_type='linear'",
        ),
        (lambda folder: add_modules(folder, "Transformer", "Pooling", "Dense"), "modules Transformer, Pooling, Dense"),
        (
            lambda folder: add_modules(folder, "Transformer", "WordWeights", "Pooling"),
            "modules Transformer, WordWeights",
        ),
        (lambda folder: add_modules(folder, "Transformer", "Pooling", pooling_mode="max"), "pools by max"),
        (
            lambda folder: add_modules(folder, "Transformer", "Pooling", pooling_mode=["cls", "mean"]),
            "pools by .'cls', 'mean'",
        ),
        (
            lambda folder: add_modules(folder, "Transformer", "Pooling", pooling_mode="mean", include_prompt=False),
            "without the prompt",
        ),
        (lambda folder: change_tokenizer(folder, by_spaces), "is not the one that llama.cpp has"),
        (lambda folder: change_tokenizer(folder, without_chinese), "is not the one that llama.cpp has"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused_before_anything_is_written(tmp_path, encoder, change, fault):
    change(encoder)
    with pytest.raises(ValueError, match=fault) as error:
        write_gguf(encoder, tmp_path / "model.gguf")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "model.gguf").exists()
