"""ONNX and OpenVINO files compute what the oracle, sentence-transformers and torch compute; a failed export leaves nothing."""

import json
import os
import re
import shutil
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import GOLDEN, SENTENCE, change_config, largest_error, largest_file, run_main
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

pytest.importorskip("nncf", reason="the export needs pip install -e '.[openvino,embed]'")

import onnx
import onnxruntime
import openvino
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from sentence_transformers.sentence_transformer.modules import Dropout, Pooling, WordWeights

import neobert_hf
from neobert_cli import commands as neobert_cli
from neobert_hf.checkpoints import examine
from neobert_hf.checkpoints.common_form import SentenceTransformer
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.embeddings.reranking import open_reranker
from neobert_hf.export import export_model, exporting, graphs
from neobert_hf.export.graphs import EmbeddingGraph, load_graph
from neobert_hf.export.parity import Reference, random_batches, torch_runner

INPUTS = ("input_ids", "attention_mask")
FP32 = 1e-5  # largest error over largest value: float32 sums in another order
TEXTS = ["the quick brown fox", "jumps", "over lazy dog and then it sleeps in a warm red house by old sea"]


def runner(file):
    if file.suffix == ".xml":
        exact = {"INFERENCE_PRECISION_HINT": "f32"}  # otherwise bfloat16, where the processor has it
        compiled = openvino.Core().compile_model(file, "CPU", exact)
        return lambda inputs: {"logits": compiled({key: np.asarray(inputs[key]) for key in INPUTS})["logits"]}
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, {key: np.asarray(inputs[key]) for key in INPUTS})))


def tiny(model_class, folder, tokenizer=None, **config):
    sizes = dict(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
    model = model_class(neobert_hf.NeoBERTConfig(**{**sizes, "max_position_embeddings": 64, **config})).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1 if name.endswith("encoder.weight") else 0.3)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return model


def embedding_model(tmp_path, tokenizer, *kinds, mode="mean", activation=None, normalized=None, **options):
    tiny(neobert_hf.NeoBERTModel, tmp_path / "network", tokenizer)
    network = neobert_hf.sentence_transformer(str(tmp_path / "network"))[0]
    weights = np.random.default_rng(0).uniform(0.5, 2, len(tokenizer)).round(3).tolist()
    words = [word for word, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    modes = 2 if isinstance(mode, tuple) else 1
    make = {
        "WordWeights": lambda: WordWeights(words, dict(zip(words, weights))),
        "Pooling": lambda: Pooling(32, mode, include_prompt=options.pop("include_prompt", True)),
        "Dense": lambda: Dense(32 * modes, 24, activation_function=activation or torch.nn.Identity()),
        "Normalize": lambda: Normalize(normalized or "sentence_embedding"),
        "Dropout": Dropout,
    }
    model = SentenceTransformer(modules=[network, *(make[kind]() for kind in kinds)], device="cpu", **options)
    model.save_pretrained(str(tmp_path / "embedder"))
    return model


def pooled(states, mask, mode):
    states, mask = torch.as_tensor(states), torch.as_tensor(mask)
    if mode == "mean":
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    if mode == "max":
        return states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)
    return states[torch.arange(len(states)), mask.argmax(1)]  # cls


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    export_model(GOLDEN / "masked_lm", folder / "masked_lm")
    export_model(GOLDEN / "classifier", folder / "openvino_only", to=["openvino"], int8=True)
    return folder


def error_of_golden(file, key):
    expected = load_file(GOLDEN / "expected.safetensors")
    (found,) = runner(file)(expected).values()
    assert found.dtype == np.float32
    return largest_error(found, expected[key], expected["attention_mask"].bool().numpy() if found.ndim == 3 else ...)


@pytest.mark.slow
def test_a_file_agrees_with_the_golden_tensors(golden):
    assert error_of_golden(golden / "masked_lm/onnx/model.onnx", "mlm_logits") < FP32
    assert error_of_golden(golden / "openvino_only/openvino/openvino_model.xml", "classifier_logits") < FP32


@pytest.mark.slow
def test_a_float16_file_agrees_with_the_golden_tensors_and_rounds_no_position(tmp_path):
    """11 bits, through three blocks. Positions in float16 are wrong by 0.1 radian at 200 tokens."""
    export_model(GOLDEN / "classifier", tmp_path / "out", fp16=True)
    whole, half = (tmp_path / "out/onnx" / name for name in ("model.onnx", "model_fp16.onnx"))
    assert error_of_golden(whole, "classifier_logits") < FP32
    assert error_of_golden(half, "classifier_logits") < 1e-2
    ids = np.random.default_rng(0).integers(0, 512, (1, 2000))
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    assert largest_error(runner(half)(batch)["logits"], runner(whole)(batch)["logits"]) < 1e-2


@pytest.mark.slow
def test_a_folder_for_openvino_alone_holds_its_files_and_int8_weights_are_a_quarter(golden):
    out, expected = golden / "openvino_only", load_file(GOLDEN / "expected.safetensors")
    assert {path.name for path in out.iterdir()} == {"config.json", "openvino"}
    small = out / "openvino/openvino_model_qint8_quantized.xml"
    found, wanted = runner(small)(expected)["logits"], expected["classifier_logits"].numpy()
    assert (found * wanted).sum() / np.linalg.norm(found) / np.linalg.norm(wanted) > 0.995
    weights = out / "openvino/openvino_model.bin"
    assert small.with_suffix(".bin").stat().st_size < 0.3 * weights.stat().st_size


@pytest.mark.slow
def test_the_folder_of_a_model_without_tokenizer_is_config_and_one_file_in_opset_20_with_free_sizes(golden):
    folder = golden / "masked_lm"
    assert {path.name for path in folder.iterdir()} == {"config.json", "onnx"}
    assert [path.name for path in (folder / "onnx").iterdir()] == ["model.onnx"]
    graph = onnx.load(folder / "onnx/model.onnx")
    assert {opset.domain: opset.version for opset in graph.opset_import} == {"": 20}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.graph.input, *graph.graph.output)}
    assert all(dim.dim_param and not dim.dim_value for shape in shapes.values() for dim in shape[:2])
    assert list(shapes) == ["input_ids", "attention_mask", "logits"]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "neobert" and config["architectures"] == ["NeoBERTLMHead"]
    assert config["max_position_embeddings"] == 128
    assert "auto_map" not in config  # the code is not in the folder
    assert AutoConfig.from_pretrained(folder).num_hidden_layers == 3
    assert all(examine(golden / name)["is_clean"] for name in ("masked_lm", "openvino_only"))


def rope(rope_type, **settings):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, **settings}}


YARN = rope("yarn", original_max_position_embeddings=16)
# Longer batches than the trained context of 16 tokens.
HEADS = {
    "feature-extraction": ("NeoBERTModel", {**rope("dynamic"), "max_position_embeddings": 16}),
    "token-classification": ("NeoBERTForTokenClassification", {"num_labels": 5, **YARN}),
    "question-answering": ("NeoBERTForQuestionAnswering", rope("linear")),
    "text-classification": ("NeoBERTForSequenceClassification", {"num_labels": 1, "classifier_pooling": "mean"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", HEADS)
def test_a_head_agrees_with_torch_at_lengths_and_paddings_that_the_exporter_has_not_seen(task, tokenizer, tmp_path):
    name, config = HEADS[task]
    model = tiny(getattr(neobert_hf, name), tmp_path / "model", tokenizer, **config)
    # by the command, which prints the report
    report = json.loads(run_main(neobert_cli, "export", tmp_path / "model", tmp_path / "out", "--json"))
    assert report["task"] == task and list(report["files"]) == ["onnx/model.onnx"]
    run = runner(tmp_path / "out/onnx/model.onnx")
    for batch in random_batches(96, 0, 60).values():
        with torch.inference_mode():
            wanted = model(**{key: torch.from_numpy(value) for key, value in batch.items()})
        for output, values in run(batch).items():
            is_real = batch["attention_mask"] != 0 if values.shape[:2] == batch["attention_mask"].shape else ...
            assert largest_error(values, wanted[output], is_real) < FP32


@pytest.fixture(scope="module")
def embedder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    kinds = ("WordWeights", "Pooling", "Dense", "Normalize")
    torch.manual_seed(0)
    model = embedding_model(folder, tokenizer, *kinds, prompts={"query": "fox ", "document": ""})
    model.max_seq_length = 40
    model.save_pretrained(str(folder / "embedder"))
    report = export_model(folder / "embedder", folder / "out", int8=True)
    return model, folder / "out", report


@pytest.mark.slow
def test_an_embedding_model_is_one_graph_and_the_mean_of_its_token_states_is_the_embedding(embedder):
    model, out, report = embedder
    batch = AutoTokenizer.from_pretrained(out)(TEXTS, padding=True, return_tensors="np")
    found, wanted = runner(out / "onnx/model.onnx")(batch), model.encode(TEXTS)
    assert list(found) == ["last_hidden_state", "sentence_embedding"]
    assert largest_error(found["sentence_embedding"], wanted) < FP32
    mean = pooled(found["last_hidden_state"], batch["attention_mask"], "mean")
    assert largest_error(torch.nn.functional.normalize(mean), wanted) < FP32
    small = runner(out / "onnx/model_quantized.onnx")(batch)["sentence_embedding"]
    assert ((small * wanted).sum(1) / np.linalg.norm(small, axis=1)).min() > 0.99
    sizes = {name: entry["bytes"] for name, entry in report["files"].items()}
    assert sizes == {name: (out / name).stat().st_size for name in sizes}
    assert sizes["onnx/model_quantized.onnx"] < sizes["onnx/model.onnx"]
    assert report["files"]["onnx/model_quantized.onnx"]["smallest_cosine"] >= 0.98
    graph = onnx.load(out / "onnx/model_quantized.onnx").graph
    rounded = [tensor.data_type for tensor in graph.initializer if tensor.name.endswith("_quantized")]
    assert {*rounded} == {onnx.TensorProto.UINT8}, "products with signed weights saturate without VNNI"
    assert len(report["files"]["onnx/model.onnx"]["errors"]) == 8


def test_a_common_factor_of_the_weights_of_words_is_not_exported():
    """Sums of the weighted token states of the mini model overflow in float16; the mean is the same to the last bit."""
    model, graph = SentenceTransformer(neobert_hf.MINI_MODEL_PATH, device="cpu"), load_graph(neobert_hf.MINI_MODEL_PATH)
    assert model[2].emb_layer.weight.max() > 16 >= graph.modules_after[1].emb_layer.weight.max() > 8
    batch = model.preprocess(["", "a", "Open a file. " * 80])
    with torch.inference_mode():
        _, found = graph(batch["input_ids"], batch["attention_mask"])
        np.testing.assert_array_equal(found, model(dict(batch))["sentence_embedding"])


def test_the_folder_of_an_embedding_model_has_what_other_tools_read(embedder):
    """text-embeddings-inference 1.9.3 (router/src/lib.rs) requires the keys of config.json and both flags of the pooling."""
    _, out, _ = embedder
    report = examine(out)
    assert report["findings"] == [] and report["layout"] == "exported"
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    settings = {name: json.loads(path.read_text()) for name, path in files.items() if path.suffix == ".json"}
    assert files.keys() - settings.keys() == {"onnx/model.onnx", "onnx/model_quantized.onnx"}
    config = settings["config.json"]
    assert all(type(config[key]) is int for key in ("max_position_embeddings", "pad_token_id", "hidden_size"))
    assert not config["architectures"][0].endswith("Classification")  # it would be served as a classifier
    modules = [(entry["path"], entry["type"].rpartition(".")[2]) for entry in settings["modules.json"]]
    assert modules == [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    pooling = settings["1_Pooling/config.json"]
    assert (pooling["pooling_mode_cls_token"], pooling["pooling_mode_mean_tokens"]) == (False, True)
    assert pooling["word_embedding_dimension"] == 24  # behind Dense
    assert settings["config_sentence_transformers.json"]["prompts"] == {"query": "fox ", "document": ""}
    assert settings["sentence_bert_config.json"]["max_seq_length"] == 40
    words = settings["tokenizer_config.json"]
    assert words["model_max_length"] == 40 and words.get("padding_side", "right") in ("left", "right")
    assert words["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 has it too
    tokenizer = settings["tokenizer.json"]
    assert tokenizer["truncation"] is None and tokenizer["padding"] is None  # a runtime sets its own
    assert {"config.json", "special_tokens_map.json"} <= settings.keys()


CHAINS = {
    "mean": ("Pooling",),
    "cls": ("Pooling", "Normalize"),
    "max": ("Pooling", "Normalize"),
    "mean, Dense with tanh": ("Pooling", "Dense"),
    "cls, Dense with tanh": ("Pooling", "Dense", "Normalize"),
    "max, Dense": ("Pooling", "Dense"),
    "mean, weights": ("WordWeights", "Pooling", "Dense"),
    "mean and max": ("Pooling", "Dense", "Normalize"),
    "mean, Normalize before Dense": ("Pooling", "Normalize", "Dense"),
    "mean, Dropout": ("Pooling", "Dropout"),
    "mean, the first 7": ("Pooling",),
    "cls, the first 7": ("Pooling", "Normalize"),
    "max, the first 7": ("Pooling", "Dense", "Normalize"),
    "mean, Normalize of the states": ("Pooling", "Normalize"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_whoever_pools_the_token_states_as_the_folder_says_gets_the_embedding(name, tokenizer, tmp_path):
    mode = ("mean", "max") if name == "mean and max" else name.partition(",")[0]
    activation = torch.nn.Tanh() if "tanh" in name else None
    states = "token_embeddings" if "states" in name else "sentence_embedding"
    options = {"activation": activation, "normalized": states, "truncate_dim": 7 if "first 7" in name else None}
    model = embedding_model(tmp_path, tokenizer, *CHAINS[name], mode=mode, **options)
    graph = load_graph(tmp_path / "embedder")
    batch = {key: torch.from_numpy(value) for key, value in random_batches(96, 0, 60)["5 ragged, padding left"].items()}
    with torch.inference_mode():
        states, embedding = graph(**batch)
        wanted = model(dict(batch))["sentence_embedding"][:, : model.truncate_dim]  # as `encode`
    assert largest_error(embedding, wanted) < FP32
    assert states.shape == (*batch["input_ids"].shape, embedding.shape[1])
    found = pooled(states, batch["attention_mask"], graph.pooling_mode)
    assert largest_error(torch.nn.functional.normalize(found) if graph.ends_normalized else found, wanted) < FP32


def test_the_task_is_that_for_which_the_model_was_saved(tokenizer, tmp_path):
    tiny(neobert_hf.NeoBERTForMaskedLM, tmp_path / "model", tokenizer)
    open_reranker(str(tmp_path / "model")).save_pretrained(str(tmp_path / "reranker"))
    assert load_graph(tmp_path / "model").task == "fill-mask"
    assert load_graph(tmp_path / "reranker").task == "text-classification"
    graph = load_graph(tmp_path / "model", "sentence-similarity")
    assert isinstance(graph, EmbeddingGraph) and graph.pooling_mode == "mean"  # of the paper


@pytest.fixture
def saved(tokenizer, tmp_path):
    tiny(neobert_hf.NeoBERTForMaskedLM, tmp_path / "saved", tokenizer)
    return tmp_path / "saved"


def adapter(folder, tokenizer):
    (folder / "adapter_config.json").write_text("{}")


def chain(*kinds, **options):
    def replace(folder, tokenizer):
        embedding_model(folder.parent, tokenizer, *kinds, **options)
        shutil.rmtree(folder)
        (folder.parent / "embedder").rename(folder)

    return replace


def another(model_class, **config):
    return lambda folder, tokenizer: tiny(model_class, folder, tokenizer, **config)


def config_with(**values):
    return lambda folder, tokenizer: change_config(folder, **values)


def nan_in(file, name):
    def spoil(folder, tokenizer):
        weights = load_file(folder / file)
        weights[name].view(-1)[0] = torch.nan
        save_file(weights, folder / file, metadata={"format": "pt"})

    return spoil


def sparse(folder, tokenizer, make=neobert_hf.sparse_encoder, more=()):
    model = make(str(folder))
    type(model)(modules=[*model, *more], device="cpu").save_pretrained(str(folder))


CLASSIFIER = neobert_hf.NeoBERTForSequenceClassification


def reranker(*modules, **options):
    def replace(folder, tokenizer):
        network = CrossEncoder(str(folder), device="cpu")[0] if not modules else Transformer(str(folder))
        CrossEncoder(modules=[network, *modules], device="cpu", **options).save_pretrained(str(folder))

    return replace


def cut_by_processor(folder, tokenizer):
    modules = [Transformer(str(folder), processing_kwargs={"text": {"max_length": 6}}), Pooling(32, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))


SCORES = {"module_output_name": "scores", "activation_function": torch.nn.Identity()}
BAD_SOURCES = {  # what is done to the folder of a masked language model, and the words of the error
    "adapter": ([adapter], "merge"),
    "multiple choice": ([another(neobert_hf.NeoBERTForMultipleChoice)], "MultipleChoice"),
    "sparse, then normalized": ([partial(sparse, more=[Normalize()])],
     "has the modules Transformer, SpladePooling, Normalize; only a NeoBERT with one SpladePooling can be exported"),
    "pooled tokens": ([partial(sparse, make=neobert_hf.multi_vector_encoder, more=[HierarchicalTokenPooling()])],
     "HierarchicalTokenPooling; only a NeoBERT with one MultiVectorMask, Dense and Normalize can be exported"),
    "two poolings": ([chain("Pooling", "Pooling")], "only a NeoBERT with one Pooling"),
    "mean without prompts": ([chain("Pooling", include_prompt=False)], "include_prompt"),
    "reranker without pooling": ([reranker(Dense(32, 1, module_input_name="token_embeddings", **SCORES))],
     "has the modules Transformer, Dense; only"),
    "reranker with tanh": ([reranker(Pooling(32, "mean"), Dense(32, 1, **SCORES), activation_fn=torch.nn.Tanh())],
     "makes scores of logits by Tanh, which config.json cannot say"),
    "length of a processor": ([cut_by_processor], "has processing_kwargs, which only torch reads"),
    "more layers of a chain": (
        [chain("Pooling"), another(neobert_hf.NeoBERTModel, num_hidden_layers=2), config_with(num_hidden_layers=1)],
        "gives num_hidden_layers=1, but its weights have 2",
    ),
    "NaN": ([nan_in("model.safetensors", "model.transformer_encoder.0.wo.weight")],
     "NaN or infinity in model.transformer_encoder.0.wo.weight; neobert doctor"),
    "NaN in a module": ([chain("Pooling", "Dense"), nan_in("2_Dense/model.safetensors", "linear.weight")],
     "NaN or infinity in .*linear.weight; neobert doctor"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_model_that_cannot_be_exported_is_refused_before_anything_is_written(name, saved, tokenizer, tmp_path):
    changes, words = BAD_SOURCES[name]
    for change in changes:
        change(saved, tokenizer)
    before = sorted(tmp_path.iterdir())
    with pytest.raises((ValueError, OSError), match=words) as caught:
        export_model(saved, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def of_setfit(folder, tokenizer):
    (folder / "config_setfit.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "task", "left_out"),
    [
        (chain("Pooling", "Normalize"), "feature-extraction", "Pooling, Normalize"),
        (reranker(Pooling(32, "mean"), Dense(32, 1, **SCORES)), "feature-extraction", "Pooling, Dense"),
        (another(CLASSIFIER), "sentence-similarity", "the head of NeoBERTForSequenceClassification"),
        (sparse, "fill-mask", "SpladePooling"),
        (of_setfit, "sentence-similarity", r"the classes of SetFit \(model_head\.pkl\)"),
        (lambda folder, tokenizer: None, "feature-extraction", None),
    ],
)
def test_what_a_task_leaves_out_is_one_line(change, task, left_out, saved, tokenizer, monkeypatch):
    lines = []
    monkeypatch.setattr(graphs.logger, "warning", lines.append)
    change(saved, tokenizer)
    load_graph(saved, task)
    assert len(lines) == bool(left_out)
    assert not left_out or re.fullmatch(rf".*saved has {left_out}, which the files for {task} leave out", lines[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "text-classification"}, "lacks classifier, dense in the shapes of config.json"),
        ({"task": "translation"}, "not one of"),
        ({"task": "sparse-encoder"}, "a SentenceTransformer, which cannot be exported for task=sparse-encoder; leave"),
        ({"to": ["tflite"]}, "tflite"),
        ({"to": []}, "not one or more of onnx, openvino, gguf"),
        ({"to": ["gguf"], "int8": True}, "int8 is for onnx and openvino files"),
        ({"to": ["openvino"], "fp16": True}, "fp16 is for onnx files"),
        ({"dtype": "q8_0"}, "dtype is for gguf files"),
        ({"to": ["gguf"], "dtype": "q4"}, "q4"),
        ({"out": "."}, "choose a new or empty folder"),
    ],
)
def test_an_option_that_cannot_be_met_is_refused_before_anything_is_written(options, words, saved, tmp_path):
    options = {**options, "out": tmp_path / options.get("out", "out")}
    with pytest.raises((ValueError, FileExistsError), match=words):
        export_model(saved, **options)
    assert os.listdir(tmp_path) == ["saved"]


def interrupt(graph, file):
    file.write_bytes(b"half of a graph")
    assert not [path for path in file.parents[1].rglob("config.json")]  # of a killed process
    raise KeyboardInterrupt


def write_too_much(graph, file):
    file.write_bytes(bytes(1 << 20))


fail_as_openvino = Mock(side_effect=RuntimeError("Exception from serialize.cpp:1\nCan't open bin file"))


@pytest.mark.parametrize("write", [interrupt, write_too_much, fail_as_openvino])
def test_an_interruption_and_a_full_disk_are_one_error_and_leave_nothing(write, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "write_onnx", write)
    (tmp_path / "out").mkdir()
    kind = KeyboardInterrupt if write is interrupt else OSError
    words = None if write is interrupt else "out cannot be written|model.onnx cannot be written"
    with largest_file(1 << 19), pytest.raises(kind, match=words) as caught:
        export_model(saved, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["out", "saved"] and not os.listdir(tmp_path / "out")


@pytest.mark.parametrize("kind, allowed, refused", [("float32", 0.5e-5, 2e-5), ("float16", 1.5e-2, 6e-2)])
def test_the_limit_of_float_files_is_an_error_over_the_largest_value(saved, kind, allowed, refused):
    """1e-5 in float32, where sums in another order differ by 1e-6; 3e-2 in float16, where torch itself reaches 1e-2."""
    reference = Reference(load_graph(saved))

    def shifted(share):
        answers = iter(reference.wanted.values())
        return lambda batch: {"logits": next(answers)[0] + share * largest}

    largest = max(np.abs(wanted[0]).max() for wanted in reference.wanted.values())
    reference.check(saved / "model.onnx", shifted(allowed), kind)
    for share in (refused, np.nan):
        with pytest.raises(ValueError, match=r"model\.onnx differs from torch by .* of the largest value"):
            reference.check(saved / "model.onnx", shifted(share), kind)


@pytest.mark.parametrize("words", [SENTENCE, "მზე და მთვარე ზღვა მთა ხე სახლი წყალი ცა"])
def test_int8_files_are_compared_on_texts_of_known_words(words, saved):
    """A tokenizer of Georgian reads documentation as unknown tokens, which say nothing about the others."""
    graph = load_graph(saved)
    graph.tokenizer = train_wordpiece([words] * 20, vocab_size=96, model_max_length=64)
    reference, unknown = Reference(graph), graph.tokenizer.unk_token_id
    assert list(reference.texts) == ["documentation", "lines", "known words"][0 if words == SENTENCE else 2 :]
    for batches in reference.texts.values():
        for batch in batches.values():
            is_unknown = (batch["input_ids"] == unknown) & (batch["attention_mask"] == 1)
            assert (is_unknown.sum(1) <= batch["attention_mask"].sum(1) / 2).all()


@pytest.mark.parametrize(
    "name, allowed, refused", [("documentation", 0.12, 0.16), ("lines", 0.12, 0.16), ("known words", 0.26, 0.34)]
)
def test_the_limit_of_int8_is_a_cosine_for_each_text(saved, name, allowed, refused):
    """A text whose numbers are turned by a share t of their length has the cosine 1 / sqrt(1 + t * t)."""
    reference = Reference(load_graph(saved))

    def turned(share):
        *_, last = reference.texts[name].values()
        run_torch = torch_runner(reference.graph)

        def run(batch):
            values = run_torch(batch)["logits"]
            if batch is last:  # one text of it
                a, b = values[0, :, ::2].copy(), values[0, :, 1::2].copy()
                values[0, :, ::2] -= share * b
                values[0, :, 1::2] += share * a
            return {"logits": values}

        return run

    reference.check(saved / "model_quantized.onnx", turned(allowed), "int8")
    with pytest.raises(ValueError, match=rf"in one less the cosine, on '{name}', more than"):
        reference.check(saved / "model_quantized.onnx", turned(refused), "int8")
