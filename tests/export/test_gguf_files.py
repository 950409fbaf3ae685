"""The GGUF file against the checkpoint, and llama.cpp's results against the oracle's."""

import ast
import builtins
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import change_config
from oracle import CONFIG, write_checkpoint
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

pytest.importorskip("gguf", reason="the export needs pip install -e '.[gguf,embed]'")

import gguf
from sentence_transformers.base.modules import Dense

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.checkpoints.embedding_models import sentence_transformer
from neobert_hf.data import plain_tokenizer
from neobert_hf.export import export_model
from neobert_hf.export.gguf import write_gguf
from neobert_hf.export.graphs import EmbeddingGraph, load_graph

LABELS = ["bad", "good", "so so"]
WHOLE_WORDS = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(91))])}
BLOCK_TENSORS = {
    "qkv": "attn_qkv", "wo": "attn_output", "attention_norm": "attn_norm",
    "ffn.w12": "ffn_up", "ffn.w3": "ffn_down", "ffn_norm": "ffn_norm",
}  # fmt: skip
OTHER_TENSORS = {
    "model.encoder.weight": "token_embd.weight", "model.layer_norm.weight": "enc.output_norm.weight",
    "dense.weight": "cls.weight", "dense.bias": "cls.bias",
    "classifier.weight": "cls.output.weight", "classifier.bias": "cls.output.bias",
}  # fmt: skip


def write_classifier(folder, weights, tokenizer, names=LABELS, **config):
    head = {name: weights[name][: len(names)] for name in ("classifier.weight", "classifier.bias")}
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    write_checkpoint(folder, weights | head, "NeoBERTForSequenceClassification", **labels, **config)
    tokenizer.save_pretrained(folder)
    return folder


def export(folder, dtype="f32"):
    """Write the encoder of a masked language model, otherwise what was saved, and return the file."""
    is_masked_lm = json.loads((folder / "config.json").read_text())["architectures"] == ["NeoBERTLMHead"]
    write_gguf(load_graph(folder, "feature-extraction" if is_masked_lm else None), folder / "model.gguf", dtype)
    return folder / "model.gguf"


def change_last_token(folder, token):
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    vocab.update({token: vocab[last]} if token else {})
    del vocab[last]
    (folder / "tokenizer.json").write_text(json.dumps(content))


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
    _, tensors, _ = read_back(export(write_classifier(tmp_path / "model", weights, tokenizer)))
    expected = expected_tensors(weights)
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], values, err_msg=name)


def test_file_describes_the_model(tmp_path, published):
    change_config(published, rope_theta=5000.0)
    settings, tensors, _ = read_back(export(published))
    assert not any(name.startswith("cls") for name in tensors)
    assert settings["general.architecture"] == "neo-bert"
    prefix = "neo-bert."
    described = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
    assert described == {
        "block_count": 3, "context_length": 64, "embedding_length": 32,
        "feed_forward_length": 72,  # not 66, two thirds of intermediate_size
        "attention.head_count": 4, "attention.causal": False, "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "rope.freq_base": 5000.0, "rope.scaling.type": "none", "pooling_type": gguf.PoolingType.MEAN,
    }  # fmt: skip


# Largest error by the largest number: half a step of f16; half of 1/127, and the rounding of the scale, which is f16.
@pytest.mark.parametrize("number_type, step", [("f16", 2**-11), ("q8_0", 1 / 254 + 2**-11)])
def test_smaller_types_round_the_matrices_only(tmp_path, weights, tokenizer, number_type, step):
    _, tensors, types = read_back(export(write_classifier(tmp_path / "model", weights, tokenizer), number_type))
    for name, values in expected_tensors(weights).items():
        is_matrix, is_narrow = values.ndim == 2, values.shape[-1] % 32 != 0  # of blk.*.ffn_down: 72 numbers
        assert types[name] == ("F32" if not is_matrix else "F16" if is_narrow else number_type.upper())
        bound = np.abs(values).max() * step if is_matrix else 0
        np.testing.assert_allclose(tensors[name], values, rtol=0, atol=bound, err_msg=name)


def test_vocabulary_marks_the_beginnings_of_words(tmp_path, published, tokenizer):
    settings = {name.removeprefix("tokenizer.ggml."): value for name, value in read_back(export(published))[0].items()}
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


@pytest.mark.parametrize("lowercase, strips, wanted", [(True, None, True), (True, False, False), (False, True, True)])
def test_accents_are_stripped_as_the_tokenizer_says_or_with_lower_case(published, lowercase, strips, wanted):
    content = json.loads((published / "tokenizer.json").read_text())
    normalizer = content["normalizer"]
    normalizer = normalizer["normalizers"][-1] if "normalizers" in normalizer else normalizer
    normalizer |= {"lowercase": lowercase, "strip_accents": strips}
    (published / "tokenizer.json").write_text(json.dumps(content))
    settings = read_back(export(published))[0]
    assert settings["tokenizer.ggml.normalizer.lowercase"] == lowercase
    assert settings["tokenizer.ggml.normalizer.strip_accents"] == wanted


@pytest.mark.parametrize("token", [None, "##\u2581fox"])
def test_an_embedding_without_a_token_of_its_own_in_llama_cpp_is_unused(tmp_path, published, token):
    """It cannot tell `##\u2581fox` from the word `fox`."""
    change_last_token(published, token)
    settings, tensors, _ = read_back(export(published))
    assert len(settings["tokenizer.ggml.tokens"]) == len(tensors["token_embd.weight"]) == CONFIG["vocab_size"]
    assert settings["tokenizer.ggml.tokens"].count("\u2581fox") == 1
    assert settings["tokenizer.ggml.token_type"][-1] == gguf.TokenType.UNUSED


@pytest.mark.parametrize("pooling, expected", [("mean", "MEAN"), ("cls", "CLS"), ("lasttoken", "LAST")])
def test_file_pools_as_the_embedding_model(tmp_path, published, pooling, expected):
    model = sentence_transformer(str(published), normalize=True)
    model[1].pooling_mode = pooling
    write_gguf(EmbeddingGraph(model), tmp_path / "model.gguf")
    assert read_back(tmp_path / "model.gguf")[0]["neo-bert.pooling_type"] == gguf.PoolingType[expected]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("names", [["LABEL_0"], ["LABEL_0", "LABEL_1"], LABELS])
def test_classifier_keeps_its_labels_and_its_pooling(tmp_path, weights, tokenizer, names, pooling):
    folder = write_classifier(tmp_path / "model", weights, tokenizer, names, classifier_pooling=pooling)
    settings, tensors, _ = read_back(export(folder))
    assert settings["neo-bert.pooling_type"] == gguf.PoolingType.RANK
    assert settings["neo-bert.classifier.pooling_type"] == gguf.PoolingType[pooling.upper()]
    assert settings["neo-bert.classifier.output_labels"] == names
    assert tensors["cls.output.weight"].shape == (len(names), CONFIG["hidden_size"])


def with_dense(folder):
    model = sentence_transformer(str(folder))
    return EmbeddingGraph(model.append(Dense(CONFIG["hidden_size"], 8)))


def with_max_pooling(folder):
    model = sentence_transformer(str(folder))
    model[1].pooling_mode = "max"
    return EmbeddingGraph(model)


def with_scaled_rope(folder):
    change_config(folder, rope_scaling={"rope_type": "linear", "factor": 2.0})
    return load_graph(folder, "feature-extraction")


def with_tokenizer(**parts):
    def change(folder):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for name, part in parts.items():
            setattr(tokenizer, name, part)
        tokenizer.save(str(folder / "tokenizer.json"))
        return load_graph(folder, "feature-extraction")

    return change


def without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    return load_graph(folder, "feature-extraction")


@pytest.mark.parametrize(
    "opened, fault",
    [
        (load_graph, "no head for fill-mask"),
        (with_dense, "this model pools by mean and has Pooling, Dense"),
        (with_max_pooling, "this model pools by max"),
        (with_scaled_rope, "rope_type='linear'"),
        (with_tokenizer(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), "not the one that llama.cpp has"),
        (with_tokenizer(normalizer=normalizers.BertNormalizer(handle_chinese_chars=False)), "not the one that"),
        (with_tokenizer(model=models.WordLevel(WHOLE_WORDS, "[UNK]")), "not the one that"),
        (without_tokenizer, "this folder has none"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused_before_anything_is_written(tmp_path, published, opened, fault):
    graph = opened(published)
    with pytest.raises(ValueError, match=fault) as error:
        write_gguf(graph, tmp_path / "model.gguf")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "model.gguf").exists()


def test_normalizers_that_llama_cpp_lacks_are_named(tmp_path, published, caplog):
    export(published)
    assert "lacks normalizers of this tokenizer (Replace, Replace)" in caplog.text
    with_tokenizer(normalizer=normalizers.BertNormalizer())(published)
    caplog.clear()
    export(published)
    assert not caplog.text


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="with llama-cpp-python the file is compared")
def test_a_file_that_was_not_compared_is_reported_with_a_warning(tmp_path, published, caplog):
    report = export_model(published, tmp_path / "out", ["gguf"], task="feature-extraction")
    assert report["files"]["model-f32.gguf"]["not_compared"] == "llama-cpp-python is not installed"
    assert "model-f32.gguf was not compared with torch; to compare it: pip install llama-cpp-python" in caplog.text


def in_llama_cpp(file, rows, pooling="UNSPECIFIED", num_values=None):
    """llama.cpp's numbers for rows of token ids: in one packed call, and one by one for token states."""
    import llama_cpp
    from llama_cpp.llama_tokenizer import BaseLlamaTokenizer

    class Ids(BaseLlamaTokenizer):
        def tokenize(self, text, *options):
            return [int(number) for number in text.split()]

        def detokenize(self, *options):
            raise NotImplementedError

    kind = getattr(llama_cpp, f"LLAMA_POOLING_TYPE_{pooling}")
    model = llama_cpp.Llama(str(file), embedding=True, pooling_type=kind, tokenizer=Ids(), verbose=False)
    texts = [" ".join(map(str, row)) for row in rows]
    found = [model.embed(text) for text in texts] if pooling == "NONE" else model.embed(texts)
    model.close()
    return [np.array(values)[..., :num_values] for values in found]


def largest_difference(found, expected):
    return max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))


def rows_of(reference, name):
    """Token ids and expected numbers of the rows of a padded batch, without padding."""
    keep = reference["attention_mask"].bool()
    ids = [row[real].tolist() for row, real in zip(reference["input_ids"], keep)]
    return ids, [values[real].numpy() for values, real in zip(reference[name], keep)]


def with_vocabulary(folder, target, tokenizer):
    """A copy of a checkpoint, with the tokenizer and as many words more as the model has embeddings."""
    shutil.copytree(folder, target)
    tokenizer.save_pretrained(target)
    content = json.loads((target / "tokenizer.json").read_text())
    vocab, size = content["model"]["vocab"], json.loads((target / "config.json").read_text())["vocab_size"]
    vocab |= {f"more{i}": i for i in range(len(vocab), size)}
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


# 1e-5 by the largest number: float32 sums in another order.
@pytest.mark.runtime
def test_llama_cpp_computes_token_states_and_vectors(tmp_path, reference, tokenizer):
    folder, _, expected = reference
    file = export(with_vocabulary(folder, tmp_path / "model", tokenizer))
    ids, states = rows_of(expected, "last_hidden_state")
    limit = 1e-5 * max(np.abs(state).max() for state in states)
    assert largest_difference(in_llama_cpp(file, ids, "NONE"), states) < limit
    pooled = {"UNSPECIFIED": lambda row: row.mean(0), "CLS": lambda row: row[0], "LAST": lambda row: row[-1]}
    for name, pool in pooled.items():
        found = in_llama_cpp(file, ids, name)
        assert largest_difference(found, [pool(state) for state in states]) < limit


@pytest.mark.runtime
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("names", [["LABEL_0"], ["LABEL_0", "LABEL_1"], LABELS])
def test_llama_cpp_computes_the_logits_of_any_number_of_labels(tmp_path, weights, oracle, tokenizer, names, pooling):
    folder = write_classifier(tmp_path / "model", weights, tokenizer, names, classifier_pooling=pooling)
    file = export(folder)
    rows = [[7], [2, 9, 3], list(range(64))]
    logits = [oracle.class_logits(oracle.encode(row)[2], pooling)[: len(names)] for row in rows]
    found = in_llama_cpp(file, rows, num_values=len(names))
    assert largest_difference(found, logits) < 1e-5 * max(np.abs(row).max() for row in logits)


@pytest.mark.runtime
def test_llama_cpp_reads_the_token_ids_of_real_texts(tmp_path):
    graph = load_graph(Path(MINI_MODEL_PATH), "feature-extraction")
    write_gguf(graph, tmp_path / "model.gguf", "q8_0")
    import llama_cpp

    model = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    inner = plain_tokenizer(graph.tokenizer)
    texts = [value.__doc__ for value in vars(builtins).values() if getattr(value, "__doc__", None)]
    texts += ["naïve café", "Straße İstanbul", "中文句子", "Привет, Ёлка", "Việt Nam", "a\tb\r\nc"]
    texts.append("IntervalArray float32 ======")
    for text in texts:
        assert model.tokenize(inner.normalizer.normalize_str(text).encode(), special=False) == inner.encode(text).ids
    assert model.tokenize(b"IntervalArray", special=False) != inner.encode("IntervalArray").ids  # as the warning says


@pytest.mark.runtime
def test_llama_cpp_joins_question_and_document_as_the_tokenizer(tmp_path, weights, tokenizer):
    file = export(write_classifier(tmp_path / "model", weights, tokenizer, ["score"]))
    import llama_cpp

    model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    adds = [getattr(llama_cpp, f"llama_vocab_get_add_{name}")(vocab) for name in ("bos", "eos", "sep")]
    assert adds == [True, True, False]  # by which its server builds [CLS] question [SEP] document [SEP]
    bare = [model.tokenize(text, add_bos=False, special=False) for text in (b"the quick fox", b"a warm house")]
    cls, sep = llama_cpp.llama_vocab_bos(vocab), llama_cpp.llama_vocab_eos(vocab)
    assert [cls, *bare[0], sep, *bare[1], sep] == tokenizer("the quick fox", "a warm house")["input_ids"]


@pytest.mark.runtime
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_export_reports_how_far_llama_cpp_is_from_torch(tmp_path, dtype):
    report = export_model(MINI_MODEL_PATH, tmp_path / "out", ["gguf"], dtype=dtype, task="feature-extraction")
    entry = report["files"][f"model-{dtype}.gguf"]
    assert entry["bytes"] == (tmp_path / "out" / f"model-{dtype}.gguf").stat().st_size
    if dtype == "q8_0":
        assert entry["compared_on"]["documentation"] > 0.999
    else:
        assert max(entry["errors"].values()) < {"f32": 1e-5, "f16": 1e-2}[dtype]


@pytest.mark.runtime
def test_the_python_code_of_the_page_runs(tmp_path, monkeypatch, capsys, published, weights, tokenizer):
    page = Path(__file__).parents[2] / "docs" / "exporting.md"
    fill, embed, classify = re.findall(r"python - <<'END'\n(.*?)END\n", page.read_text("utf-8"), re.DOTALL)
    classifier = write_classifier(tmp_path / "model", weights, tokenizer)
    for name, folder in (("exported", published), ("classifier", classifier)):
        (tmp_path / name).mkdir()
        export(folder).rename(tmp_path / name / "model-f32.gguf")
    export_model(published, tmp_path / "eurobert", to="eurobert")
    monkeypatch.chdir(tmp_path)
    exec(fill, {})
    assert len(ast.literal_eval(capsys.readouterr().out)) == 5  # of the pipeline
    exec(embed, {})
    assert capsys.readouterr().out == f"2 {CONFIG['hidden_size']}\n"
    exec(classify, {})
    assert list(ast.literal_eval(capsys.readouterr().out)) == LABELS
