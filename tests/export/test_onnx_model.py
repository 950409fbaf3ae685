"""OnnxModel: the results of sentence-transformers and of pipelines, without torch; one-line errors; many threads."""

import copy
import json
import os
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from conftest import SENTENCE, change_config, logits_of_modules, reranker_of_modules
from scipy.special import expit, softmax
from scipy.stats import spearmanr
from sentence_transformers import CrossEncoder, SentenceTransformer
from seqeval.metrics.sequence_labeling import get_entities
from transformers import pipeline

import neobert_hf
from neobert_hf.checkpoints.embedding_models import open_embedding_model
from neobert_hf.export import OnnxModel, export_model, open_folder
from neobert_hf.finetuning import Tagger
from neobert_hf.finetuning.scores import scores_of

TEXTS = [
    *[line for line in Path(json.__file__).read_text("utf-8").splitlines() if len(line) > 40][:40],
    "",
    "x",
    "naïve café — λ, ∑; `np.ndarray` 🤗 camelCase",
    "A text that is longer than the model reads. " * 30,
]

in_both_runtimes = pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])


def linked(source, folder):
    """A copy of a folder whose files are links, since the graphs are large."""
    return shutil.copytree(source, folder, copy_function=os.symlink)


def replace(file, content):
    """Write a file in place of a link, or of none; None deletes it."""
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_text(content)


@pytest.fixture(scope="module")
def sentence_transformer():
    return open_embedding_model(neobert_hf.MINI_MODEL_PATH, device="cpu")


@pytest.mark.slow
@in_both_runtimes
def test_encode_gives_the_embeddings_of_sentence_transformers(exported_mini, sentence_transformer, runtime):
    """Within 1e-5, the error of float32 products in another order; the largest coordinate is 7."""
    model = OnnxModel(exported_mini, runtime=runtime, num_threads=1)
    sentence_transformer.prompts = model.prompts = {"query": "Which function returns ", "document": ""}
    for options in ({}, {"normalize_embeddings": True}, {"prompt_name": "query"}, {"prompt": "a: ", "batch_size": 7}):
        found, wanted = model.encode(TEXTS, **options), sentence_transformer.encode(TEXTS, **options)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=str(options))
    assert model.encode("x").shape == (256,) and model.encode([]).shape == (0, 256)
    with pytest.raises(ValueError, match=r"has no prompt 'passage'; choose from query, document"):
        model.encode("x", prompt_name="passage")
    with pytest.raises(ValueError, match="outputs last_hidden_state, sentence_embedding, and not logits; encode"):
        model.predict("x")


@pytest.mark.slow
@in_both_runtimes
def test_int8_embeddings_have_nearly_the_direction_of_float32(exported_mini, sentence_transformer, runtime):
    """0.995 is what the export promises; the texts contain the empty one, whose words have the smallest weights."""
    found = OnnxModel(exported_mini, "int8", runtime).encode(TEXTS, normalize_embeddings=True)
    wanted = sentence_transformer.encode(TEXTS, normalize_embeddings=True)
    assert (found * wanted).sum(1).min() > 0.995


@in_both_runtimes
def test_threads_that_share_a_model_get_their_own_results(exported_mini, runtime):
    model = OnnxModel(exported_mini, runtime=runtime, num_threads=1)
    texts = TEXTS[-12:-1]
    wanted = [model.encode(text) for text in texts]
    with ThreadPoolExecutor(32) as threads:
        for found, vector in zip(threads.map(model.encode, texts * 10), wanted * 10):
            np.testing.assert_array_equal(found, vector)


def test_texts_come_in_any_container_and_other_values_are_refused(exported_mini):
    model = OnnxModel(exported_mini)
    wanted = model.encode(TEXTS[:3])
    for texts in (tuple(TEXTS[:3]), iter(TEXTS[:3]), np.array(TEXTS[:3]), pd.Series(TEXTS[:3], index=[2, 0, 1])):
        np.testing.assert_array_equal(model.encode(texts), wanted)
    for value in (["a", float("nan")], ["a", None], {"text": "a"}):
        for run in (model, model.encode):
            with pytest.raises(TypeError):
                run(value)


def test_a_tokenizer_without_a_token_for_padding_gives_the_same_embeddings(exported_mini, tmp_path):
    folder = linked(exported_mini, tmp_path / "folder")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    replace(folder / "tokenizer_config.json", json.dumps({k: v for k, v in settings.items() if k != "pad_token"}))
    np.testing.assert_array_equal(OnnxModel(folder).encode(TEXTS[:9]), OnnxModel(exported_mini).encode(TEXTS[:9]))


def exported(model_class, config, tokenizer, folder, **options):
    for name, value in {"num_hidden_layers": 1, **options}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    export_model(folder / "model", folder / "exported")
    return model, OnnxModel(folder / "exported")


def assert_equal_results(found, wanted):
    """Equal but for scores, within 1e-5, and `word`, which the pipeline takes from the tokens and we from the text."""
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted):
            assert_equal_results(a, b)
    else:
        assert found.keys() == wanted.keys()
        assert found["score"] == pytest.approx(wanted["score"], abs=1e-5)
        for name in wanted.keys() - {"score", "word"}:
            assert found[name] == wanted[name]
        assert found.get("word", "").lower().replace(" ", "") == wanted.get("word", "").replace(" ", "")


SENTENCES = [SENTENCE, "The fox", "a quick dog, and then unknowns: %", "sleeps"]


@pytest.mark.slow
def test_predict_classifies_as_the_pipeline_does_and_a_call_gives_the_logits(tiny_config, tokenizer, tmp_path):
    model, onnx = exported(neobert_hf.NeoBERTForSequenceClassification, tiny_config, tokenizer, tmp_path, num_labels=3)
    for kind in (None, "multi_label_classification", "regression"):
        model.config.problem_type = onnx.config["problem_type"] = kind
        onnx.saved.__dict__.pop("score_type", None)  # the type of the last kind
        classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
        assert_equal_results(onnx.predict(SENTENCES), classify(SENTENCES))
        assert_equal_results(onnx.predict(SENTENCES, top_k=2), classify(SENTENCES, top_k=2))
        pair = classify({"text": SENTENCE, "text_pair": "The fox"})
        assert_equal_results(onnx.predict((SENTENCE, "The fox")), pair)
    pairs = [(SENTENCE, "The fox"), ("a dog", "jumps over")]
    with torch.inference_mode():
        wanted = model(**tokenizer(*zip(*pairs), padding=True, return_tensors="pt")).logits
    np.testing.assert_allclose(onnx(pairs)["logits"], wanted.numpy(), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(onnx(pairs[0])["logits"], wanted[:1].numpy(), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(onnx("The fox")["logits"], onnx(["The fox"])["logits"])
    for value in ({"text": "a"}, ("a", "b", "c")):
        for run in (onnx, onnx.predict):
            with pytest.raises(TypeError):
                run(value)


RERANKERS = {  # labels, activation of the scores, its definition
    "one": (1, None, expit),
    "one, as it is": (1, torch.nn.Identity(), np.asarray),
    "three, as they are": (3, torch.nn.Identity(), np.asarray),
    "three of which several": (3, torch.nn.Sigmoid(), expit),
    "two of which one": (2, torch.nn.Softmax(), partial(softmax, axis=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_modular", [True, False])
@pytest.mark.parametrize("name", RERANKERS)
def test_a_reranker_gives_the_scores_of_sentence_transformers(tiny_config, tokenizer, tmp_path, name, is_modular):
    """Of all modules, with the default prompt and length; a problem type of the encoder does not count."""
    num_labels, activation, by_definition = RERANKERS[name]
    tiny_config.num_hidden_layers, tiny_config.problem_type, tiny_config.num_labels = 1, "regression", num_labels
    torch.manual_seed(0)
    model_class = neobert_hf.NeoBERTModel if is_modular else neobert_hf.NeoBERTForSequenceClassification
    model_class(tiny_config).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    options = {"prompts": {"text": "old sea "}, "default_prompt_name": "text", "activation_fn": activation}
    make = reranker_of_modules if is_modular else partial(CrossEncoder, device="cpu")
    model = make(str(tmp_path / "encoder"), num_labels=num_labels, **options)
    model.max_seq_length = 24
    model.save_pretrained(str(tmp_path / "reranker"))
    report = export_model(tmp_path / "reranker", tmp_path / "out", to=["onnx", "openvino"])
    assert report["task"] == "text-classification"
    pairs = [(SENTENCE, "The fox"), ("a dog", "jumps over"), ("sleeps", SENTENCE), (SENTENCE, "it sleeps " * 9)]
    wanted = CrossEncoder(str(tmp_path / "reranker"), device="cpu").predict(pairs).reshape(len(pairs), -1)
    if is_modular:
        logits = logits_of_modules(tmp_path / "reranker", [(f"old sea {a}", b) for a, b in pairs], 24)
        np.testing.assert_allclose(wanted, by_definition(logits), rtol=0, atol=2e-6)
    for runtime in ("onnxruntime", "openvino"):
        found = OnnxModel(tmp_path / "out", runtime=runtime).predict(pairs, top_k=num_labels)
        scores = [[by_label[f"LABEL_{i}"] for i in range(num_labels)] for by_label in map(scores_by_label, found)]
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="cannot be exported for task=sentence-similarity; leave out"):
        export_model(tmp_path / "reranker", tmp_path / "vectors", task="sentence-similarity")


@pytest.mark.slow
@pytest.mark.parametrize("version", [3, 4])
def test_a_reranker_of_an_older_version_keeps_its_activation(tiny_config, tokenizer, tmp_path, version):
    """Versions 3 to 5 of sentence-transformers write it into config.json, and no other file tells a cross-encoder."""
    tiny_config.num_labels = 1
    model = neobert_hf.NeoBERTForSequenceClassification(tiny_config).eval()
    path, folder = "torch.nn.modules.linear.Identity", tmp_path / "saved"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    of_version_4 = {"sentence_transformers": {"activation_fn": path, "version": "4.1.0"}}
    change_config(folder, **(of_version_4 if version == 4 else {"sbert_ce_default_activation_function": path}))
    pairs = [(SENTENCE, "The fox"), ("a dog", "jumps over")]
    wanted = [model(**tokenizer(*pair, return_tensors="pt")).logits.item() for pair in pairs]
    assert CrossEncoder(str(folder), device="cpu").predict(pairs) == pytest.approx(wanted, abs=1e-6)
    export_model(folder, tmp_path / "out")
    assert [found["score"] for found in OnnxModel(tmp_path / "out").predict(pairs)] == pytest.approx(wanted, abs=1e-5)
    served = open_folder(folder)
    assert served.saved.kind == "score"
    assert [label["score"] for (label,) in served.labels(pairs)] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("low", [-20, -12, 14, 17])
def test_a_score_is_the_sigmoid_in_float64_so_that_near_logits_are_no_tie(low):
    logits = np.linspace(low, low + 3, 21, dtype=np.float32)
    scores = scores_of(logits, "multi_label_classification")
    np.testing.assert_allclose(scores, expit(logits.astype(np.float64)), rtol=1e-12)
    assert len({*scores}) == 21


@pytest.mark.slow
def test_a_reranker_of_modules_keeps_its_order_in_int8_and_is_refused_where_its_head_would_be_lost(tmp_path):
    """The rank correlation of 64 pairs was 0.995 and 0.999."""
    reranker = reranker_of_modules(neobert_hf.MINI_MODEL_PATH)
    reranker.save_pretrained(str(tmp_path / "mini"))
    report = export_model(tmp_path / "mini", tmp_path / "out", to=["onnx", "openvino"], int8=True)
    assert min(file.get("smallest_cosine", 1) for file in report["files"].values()) > 0.98
    words, rng = SENTENCE.split(), np.random.default_rng(0)
    pairs = [tuple(" ".join(rng.choice(words, rng.integers(1, most))) for most in (9, 40)) for _ in range(64)]
    for runtime in ("onnxruntime", "openvino"):
        found = [label["score"] for label in OnnxModel(tmp_path / "out", "int8", runtime).predict(pairs)]
        assert spearmanr(found, reranker.predict(pairs)).statistic > 0.98
    for to, words in {"gguf": "Dense, LayerNorm, Dense, so its", "eurobert": "EuroBERT for classes"}.items():
        with pytest.raises(ValueError, match=words) as caught:
            export_model(tmp_path / "mini", tmp_path / to, to=to)
        assert "\n" not in str(caught.value) and not (tmp_path / to).exists()


def scores_by_label(found):
    return {entry["label"]: entry["score"] for entry in found}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [pytest.param(["Pooling"], marks=pytest.mark.slow), ["Pooling", "Normalize"]])
def test_an_embedding_is_as_long_as_that_of_sentence_transformers(tiny_config, tokenizer, tmp_path, kinds):
    tiny_config.num_hidden_layers = 1
    neobert_hf.NeoBERTModel(tiny_config).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    model = neobert_hf.sentence_transformer(str(tmp_path / "encoder"), normalize="Normalize" in kinds)
    model.truncate_dim = 7
    model.save_pretrained(str(tmp_path / "saved"))
    export_model(tmp_path / "saved", tmp_path / "out")
    wanted = SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(SENTENCES)
    np.testing.assert_allclose(OnnxModel(tmp_path / "out").encode(SENTENCES), wanted, rtol=0, atol=1e-5)
    pooling = json.loads((tmp_path / "out/1_Pooling/config.json").read_text())
    assert wanted.shape[1] == pooling["word_embedding_dimension"]
    assert len(json.loads((tmp_path / "out/modules.json").read_text())) == 2  # a cut vector has not the length 1
    with pytest.raises(ValueError, match=r"has no other module; this model pools by mean and has .*truncate_dim"):
        export_model(tmp_path / "saved", tmp_path / "gguf", to="gguf")


@pytest.mark.slow
@pytest.mark.parametrize("side", [pytest.param("right", marks=pytest.mark.slow), "left"])
def test_a_call_warns_once_of_the_texts_and_tokens_that_it_cuts(tiny_config, tokenizer, tmp_path, side):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length, tokenizer.truncation_side = 16, side
    config = {"num_labels": 3, "problem_type": None}
    _, onnx = exported(neobert_hf.NeoBERTForSequenceClassification, tiny_config, tokenizer, tmp_path, **config)
    texts = ["The fox", *[f"{SENTENCE} [MASK] café " * n for n in range(1, 9)]]
    pairs = [(a, b) for a in texts[:4] for b in texts[:4]]
    whole = tokenizer.backend_tokenizer
    whole.no_truncation()
    whole.no_padding()
    for given in (texts, pairs, texts[3]):
        batch = [given] if isinstance(given, str) else given
        lost = [max(len(encoding.ids) - 16, 0) for encoding in whole.encode_batch(batch)]
        for run in (onnx, partial(onnx.predict, batch_size=3)):
            with pytest.warns(UserWarning) as caught:
                run(given)
            fact = f"{np.count_nonzero(lost)} of {len(batch)} texts are truncated to 16 tokens, and "
            fact += "at least " * (max(lost) > 16) + f"{sum(lost):,} tokens are lost"
            assert [str(each.message) for each in caught] == [f"{fact}; split long texts"]
            assert caught[0].filename == __file__
            with pytest.raises(ValueError, match=f"^{fact}; split long texts, or choose warn as truncation"):
                run(given, truncation="error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnx.predict(texts[0])
        assert onnx.predict(texts, truncation="off") and onnx(texts, truncation="off")


ODD_TEXTS = ["fox\tdog\u00adhouse 🤗 old\u00adsea\n" * 9, "the,fox." * 20, "東京" * 30, f"the{'house' * 15} sea " * 3]


@pytest.mark.slow
@pytest.mark.parametrize("num_windows", [pytest.param(20, marks=pytest.mark.slow), 3])
def test_a_tagger_gives_what_torch_gives_for_a_name_at_every_place(tiny_config, tokenizer, tmp_path, num_windows):
    """Windows have 14 tokens, of which three overlap; the words of the last text have 46."""
    tokenizer, names = copy.deepcopy(tokenizer), ["O", "B-PLACE", "I-PLACE", "B-NAME", "I-NAME"]
    tokenizer.model_max_length = 16
    options = {"num_labels": 5, "id2label": dict(enumerate(names)), "label2id": dict(zip(names, range(5)))}
    _, onnx = exported(neobert_hf.NeoBERTForTokenClassification, tiny_config, tokenizer, tmp_path, **options)
    tokenizer.backend_tokenizer.no_truncation()
    length, rows = 14 + 11 * (num_windows - 1), []
    texts = [f"{'the ' * place}Foxdog sea{' house' * (length - place - 4)}" for place in range(length - 3)] + ODD_TEXTS
    for text in texts:
        whole = tokenizer.backend_tokenizer.encode(text)
        assert len(whole.ids) >= length or text in ODD_TEXTS
        rows.append([whole.word_to_chars(word) for word in dict.fromkeys(whole.word_ids) if word is not None])
    split = [[text[start:end] for start, end in words] for text, words in zip(texts, rows)]
    wanted = []
    for words, scores in zip(rows, Tagger(tmp_path / "model", 16, verbose=False).predict_proba(split)):
        wanted.append([])
        for kind, i, j in get_entities([names[tag] for tag in scores.argmax(-1)]):  # of seqeval
            score = pytest.approx(scores.max(-1)[i : j + 1].mean(), abs=1e-5)
            wanted[-1].append((kind, words[i][0], words[j][1], score))
    assert {kind for entities in wanted for kind, *_ in entities} == {"PLACE", "NAME"}
    for batch_size in (32, 1):
        none, *found = onnx.predict(["", *texts], batch_size=batch_size, truncation="error")
        keys = ("entity_group", "start", "end", "score")
        assert none == [] and [[tuple(map(each.get, keys)) for each in entities] for entities in found] == wanted
    with pytest.raises(ValueError, match=r"^\('a', 'b'\) is a pair, and a tagger reads one text; give a text"):
        onnx.predict(("a", "b"))


@pytest.mark.slow
def test_predict_fills_the_masks_of_the_pipeline(tiny_config, tokenizer, tmp_path):
    model, onnx = exported(neobert_hf.NeoBERTForMaskedLM, tiny_config, tokenizer, tmp_path)
    settings = tmp_path / "exported/tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"padding_side": "left"}))
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
    texts = ["the [MASK] fox jumps over the lazy dog", "[MASK]", "the fox [MASK]"]
    for opened in (onnx, OnnxModel(tmp_path / "exported")):
        for text, found in zip(texts, opened.predict(texts)):
            assert_equal_results(found, fill(text))
    assert len(onnx.predict(texts[2], top_k=3)) == 3
    for text, count in {"the fox": 0, "[MASK] [MASK]": 2}.items():
        with pytest.raises(ValueError, match=rf"has {count} \[MASK\] in its first 64 tokens; put one in place"):
            onnx.predict(["a [MASK]", text])
    with pytest.raises(ValueError, match=r"has the outputs logits, and not sentence_embedding; encode, "):
        onnx.encode("the fox")


KINDS = "has no dtype='f32'; onnxruntime has fp32, fp16, int8; openvino has fp32, bf16"
CANNOT_RUN = [  # a file with another content, options, and the words of the error
    ("onnx/model.onnx", None, {}, "model.onnx; write it by `neobert export`, whose options --to, "),
    ("tokenizer.json", None, {}, "lacks tokenizer.json, which `neobert export` writes"),
    ("config.json", "{", {}, "config.json is not JSON"),
    ("tokenizer.json", "{}", {}, "tokenizer.json cannot be read"),
    ("onnx/model.onnx", "a", {}, "model.onnx cannot be read"),
    ("openvino/openvino_model.xml", "<", {"runtime": "openvino"}, "openvino_model.xml cannot be read"),
    (None, None, {"dtype": "f32"}, KINDS),
    (None, None, {"runtime": "tensorrt"}, "runtime='tensorrt' has no dtype='fp32'; onnxruntime has"),
    (None, None, {"dtype": "fp16"}, "has no file onnx/model_fp16.onnx; write it"),
]


@pytest.mark.parametrize(("name", "content", "options", "words"), CANNOT_RUN)
def test_a_folder_that_cannot_run_is_refused_in_one_line(exported_mini, tmp_path, name, content, options, words):
    folder = linked(exported_mini, tmp_path / "folder")
    if name:
        replace(folder / name, content)
    with pytest.raises((FileNotFoundError, ValueError)) as raised:
        OnnxModel(folder, **options)
    assert words in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_the_package_runs_an_exported_folder_where_torch_and_transformers_are_not_installed(exported_mini):
    script = f"""
import sys
sys.modules.update(torch=None, transformers=None, pyarrow=None, yaml=None, jinja2=None)
import neobert_hf
from neobert_hf.export import OnnxModel
print(neobert_hf.__version__, OnnxModel({str(exported_mini)!r}).encode("Open a file.")[:3].tolist())
assert not hasattr(neobert_hf, "nothing")
for line in ("from neobert_hf import NeoBERTModel", "from neobert_hf.export import export_model"):
    try:
        exec(line)
    except ImportError as error:
        print(error)
from neobert_cli import commands as neobert_cli
for words in (["export", {str(exported_mini)!r}, "out"], ["doctor", {str(exported_mini)!r}]):
    sys.argv = ["neobert", *words]
    try:
        neobert_cli.main()
    except SystemExit as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *errors, export, doctor = done.stdout.splitlines()
    version, _, vector = first.partition(" ")
    assert version == neobert_hf.__version__
    np.testing.assert_array_equal(json.loads(vector), OnnxModel(exported_mini).encode("Open a file.")[:3].tolist())
    assert errors[0] == "neobert_hf.NeoBERTModel needs torch; install the package with its dependencies"
    assert len(errors) == 2 and errors[1].startswith("No module named 'transformers")
    for command, line in (("export", export), ("doctor", doctor)):
        assert line.startswith(f"neobert {command}: ")
        assert line.endswith("; install the package with its dependencies: pip install neobert_hf")


def test_every_public_name_exists_where_torch_is_installed():
    assert all(hasattr(neobert_hf, name) for name in neobert_hf.__all__)
    assert transformers.AutoConfig.for_model("neobert").model_type == "neobert"
