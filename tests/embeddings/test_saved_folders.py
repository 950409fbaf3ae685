"""Each way of saving writes a folder that older versions of sentence-transformers, transformers 4 and 5, and servers read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights
from transformers import AutoTokenizer

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.checkpoints.tokenizer import load_tokenizer
from neobert_hf.embeddings import SentenceTransformer, open_embedding_model, open_reranker

ROOT = Path(__file__).parents[2]
TEXTS = ["the quick brown fox", "jumps", "over lazy dog and then it sleeps in a warm red house by old sea"]
# The arguments of the modules in sentence-transformers 3.4.1, which refuse any other name in a config.json. Normalize reads none.
OLDEST = {
    "Transformer": {"max_seq_length", "do_lower_case", "model_args", "tokenizer_args", "config_args"},
    "WordWeights": {"vocab", "word_weights", "unknown_word_weight"},
    "Dense": {"in_features", "out_features", "bias", "activation_function"},
    "Pooling": {
        *("word_embedding_dimension", "include_prompt", "pooling_mode", "pooling_mode_cls_token"),
        *("pooling_mode_max_tokens", "pooling_mode_mean_tokens", "pooling_mode_mean_sqrt_len_tokens"),
        *("pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken"),
    },
}


def read(file):
    return json.loads(Path(file).read_text("utf-8"))


@pytest.fixture
def weighted(folder):
    """A model with token weights before the mean and a map after it."""
    first = neobert_hf.sentence_transformer(folder)[0]
    vocabulary, rng = list(first.tokenizer.get_vocab()), np.random.default_rng(0)
    weights = dict(zip(vocabulary, rng.uniform(0.5, 3, len(vocabulary)).round(3).tolist()))
    vocabulary = first.tokenizer.convert_ids_to_tokens(range(len(vocabulary)))
    width = first.get_embedding_dimension()
    dense = Dense(width, 8, bias=False, activation_function=None)
    return SentenceTransformer(modules=[first, WordWeights(vocabulary, weights), Pooling(width, "mean"), dense])


def assert_common_form(folder):
    modules = read(folder / "modules.json")
    for module in modules:
        package, _, kind = module["type"].rpartition(".")
        assert package == "sentence_transformers.models"  # a name in 3.4, and an alias in 6.2
        if kind in OLDEST:
            file = folder / (module["path"] or ".") / ("config.json" if module["path"] else "sentence_bert_config.json")
            assert set(read(file)) <= OLDEST[kind]
    pooling = read(folder / "1_Pooling/config.json")  # the literal path that servers read
    assert [name for name, value in pooling.items() if value is True and name.startswith("pooling_mode")]
    assert read(folder / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert {"max_position_embeddings", "auto_map"} <= set(read(folder / "config.json"))


@pytest.mark.compat
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [False, True])
def test_an_embedding_model_is_saved_in_the_form_of_all_versions(folder, tmp_path, pooling, normalize):
    model = neobert_hf.sentence_transformer(folder, pooling, normalize=normalize, max_seq_length=12)
    model.save_pretrained(str(tmp_path))
    assert_common_form(tmp_path)
    assert read(tmp_path / "1_Pooling/config.json")[f"pooling_mode_{pooling}_token" + "s" * (pooling == "mean")]
    assert read(tmp_path / "sentence_bert_config.json")["max_seq_length"] == 12
    for again in (sentence_transformers.SentenceTransformer(str(tmp_path)), open_embedding_model(str(tmp_path))):
        assert again.max_seq_length == 12
        np.testing.assert_array_equal(again.encode(TEXTS), model.encode(TEXTS))


@pytest.mark.compat
def test_a_weighted_model_computes_what_its_files_say(folder, weighted, tmp_path):
    """Saved twice into one folder, as a trainer does, and read without sentence-transformers."""
    weighted.save_pretrained(str(tmp_path))
    with torch.no_grad():
        weighted[1].emb_layer.weight.mul_(1 + torch.rand_like(weighted[1].emb_layer.weight))  # as after a training
    weighted.save_pretrained(str(tmp_path))
    assert_common_form(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"0_WordWeights", "1_Pooling", "2_Dense"}
    weights = read(tmp_path / "0_WordWeights/config.json")["word_weights"]
    matrix = load_file(tmp_path / "2_Dense/model.safetensors")["linear.weight"].double().numpy()
    encoder, tokenizer = NeoBERTModel.from_pretrained(tmp_path).double().eval(), AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = encoder(**inputs).last_hidden_state[0].numpy()
        tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
        expected.append(matrix @ np.average(states, axis=0, weights=[weights[token] for token in tokens]))
    for again in (sentence_transformers.SentenceTransformer(str(tmp_path)), open_embedding_model(str(tmp_path))):
        np.testing.assert_allclose(again.encode(TEXTS), expected, atol=1e-5)  # float32
    bf16 = open_embedding_model(str(tmp_path), model_kwargs={"dtype": torch.bfloat16}).encode(TEXTS)
    np.testing.assert_allclose(bf16, expected, atol=5e-2 * np.abs(expected).max())  # some roundings of 2^-9


def test_two_modules_of_a_kind_before_the_pooling_keep_their_own_folders(folder, tmp_path):
    first = neobert_hf.sentence_transformer(folder)[0]
    width = first.get_embedding_dimension()
    layers = [Dense(*shape, module_input_name="token_embeddings") for shape in ((width, 64), (64, width))]
    model = SentenceTransformer(modules=[first, *layers, Pooling(width, "mean")])
    model.save_pretrained(str(tmp_path))
    again = sentence_transformers.SentenceTransformer(str(tmp_path))
    np.testing.assert_allclose(again.encode(TEXTS), model.encode(TEXTS), atol=1e-6)  # float32


def test_checkpoints_and_the_result_of_a_training_have_this_form(weighted, tmp_path):
    from datasets import Dataset

    options = {"max_steps": 1, "save_steps": 1, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True}
    arguments = SentenceTransformerTrainingArguments(str(tmp_path), **options)
    pairs = Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]})
    loss = MultipleNegativesRankingLoss(weighted)
    trainer = SentenceTransformerTrainer(weighted, arguments, train_dataset=pairs, loss=loss)
    trainer.train()
    trainer.save_model()
    for saved in (tmp_path, tmp_path / "checkpoint-1"):
        assert_common_form(saved)
        # 1e-6: the weights of the file are those of the training, to the last digit of float32
        again = sentence_transformers.SentenceTransformer(str(saved))
        np.testing.assert_allclose(again.encode(TEXTS), weighted.encode(TEXTS), atol=1e-6)


@pytest.mark.compat
@pytest.mark.parametrize("saved", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_all_that_is_opened_here_saves_the_tokenizer_under_the_name_that_transformers_4_knows(folder, tmp_path, saved):
    (tmp_path / "start").mkdir()
    for file in Path(folder).iterdir():
        shutil.copy(file, tmp_path / "start")
    start, tokenizer = str(tmp_path / "start"), load_tokenizer(folder)
    if transformers.__version__.startswith("5."):  # transformers 4 refuses the first name
        settings = read(tmp_path / "start/tokenizer_config.json") | {"tokenizer_class": saved}
        (tmp_path / "start/tokenizer_config.json").write_text(json.dumps(settings))
    opened = {
        "tokenizer": load_tokenizer(start),
        "dense": open_embedding_model(start),
        "sparse": neobert_hf.sparse_encoder(start),
        "multi_vector": neobert_hf.multi_vector_encoder(start),
        "reranker": open_reranker(start),
    }
    for name, model in opened.items():
        model.save_pretrained(str(tmp_path / name))
        assert read(tmp_path / name / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast", name
        again = load_tokenizer(str(tmp_path / name))
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


PLAIN = """
import sys
if sys.argv[2] == "with": import neobert_hf
from transformers import AutoTokenizer
print(type(AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)))
"""


@pytest.mark.slow
def test_the_package_does_not_change_how_the_tokenizers_of_other_models_load(tokenizer, tmp_path):
    """One with code of its own, saved under the name of the stock class."""
    (tmp_path / "code.py").write_text("import transformers\nclass Own(transformers.PreTrainedTokenizerFast): pass\n")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    tokenizer.save_pretrained(tmp_path)
    settings = read(tmp_path / "tokenizer_config.json") | {"auto_map": {"AutoTokenizer": [None, "code.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    command = [sys.executable, "-c", PLAIN, str(tmp_path)]
    found = [subprocess.run([*command, how], capture_output=True, text=True).stdout for how in ("without", "with")]
    assert found[0] == found[1] and "code.Own" in found[0]


@pytest.mark.compat
@pytest.mark.parametrize("size, saved", [(3072, 3072), (1024, 1032), (1032, 1032), (96, 96), (100, 108), (2, 12)])
def test_two_thirds_of_the_saved_size_are_the_width(size, saved, tmp_path):
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    model = NeoBERTModel(NeoBERTConfig(**shape, intermediate_size=size))
    model.save_pretrained(tmp_path)
    assert read(tmp_path / "config.json")["intermediate_size"] == saved
    width = load_file(tmp_path / "model.safetensors")["transformer_encoder.0.ffn.w3.weight"].shape[1]
    assert int(2 * saved / 3) == width  # as llama.cpp computes it
    again = NeoBERTModel.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=0, rtol=0)


OTHER = """
import sys; sys.modules["neobert_hf"] = None
import json, numpy as np, sentence_transformers, transformers
folder, texts = sys.argv[1], json.loads(sys.argv[2])
vectors = {}
for path in sys.argv[3:]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/{path}", trust_remote_code=True)
    assert tokenizer(texts)["input_ids"], path
    name = "CrossEncoder" if path == "CrossEncoder" else "SparseEncoder" if path == "SparseEncoder" else "SentenceTransformer"
    model = getattr(sentence_transformers, name)(f"{folder}/{path}", trust_remote_code=True)
    assert type(model[0].model).__module__.startswith("transformers_modules."), path
    found = model.predict([(text, text) for text in texts]) if name == "CrossEncoder" else model.encode(texts)
    vectors[path] = found.to_dense().numpy() if name == "SparseEncoder" else found
np.savez(f"{folder}/found.npz", **vectors)
"""


def other_python():
    """A Python with transformers 4 if this one has 5, and the other way round; tests/compat.py makes the environments."""
    found = [ROOT / ".venv/bin/python", *sorted(ROOT.glob(".venv-compat/4.*/bin/python"))]
    if transformers.__version__.startswith("5."):
        found = found[1:]
    return next((python for python in found if python.exists()), None)


@pytest.mark.slow
@pytest.mark.compat
def test_what_one_version_of_transformers_saves_another_one_loads(folder, weighted, tmp_path):
    if not (python := other_python()):
        pytest.skip("this clone has one version of transformers (make test-compat installs others)")
    models = {
        "ours": neobert_hf.sentence_transformer(folder, normalize=True),
        "weighted": weighted,
        "SparseEncoder": neobert_hf.sparse_encoder(folder),
        "CrossEncoder": open_reranker(folder),
    }
    for name, model in models.items():
        model.save_pretrained(str(tmp_path / name))
    command = [str(python), "-c", OTHER, str(tmp_path), json.dumps(TEXTS), *models]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for name, found in np.load(tmp_path / "found.npz").items():
        model, pairs = models[name], [(text, text) for text in TEXTS]
        expected = model.predict(pairs) if name == "CrossEncoder" else model.encode(TEXTS)
        expected = expected.to_dense().numpy() if name == "SparseEncoder" else expected
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)  # float32
