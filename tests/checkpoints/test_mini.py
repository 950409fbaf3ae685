"""The model inside the package is small and complete, and its card states the measured results."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)
from verifying import check_own_code, verify

import neobert_hf
from neobert_hf import sentence_transformer
from neobert_hf.checkpoints.embedding_models import open_embedding_model
from neobert_hf.embeddings import ContrastiveTrainer

FOLDER, TEACHER = Path(neobert_hf.MINI_MODEL_PATH), "all-MiniLM-L6-v2"


def test_embedding_model_and_masked_model_load_completely_from_one_folder_of_at_most_24_megabytes():
    for auto_class in (AutoModel, AutoModelForMaskedLM):
        model, loading = auto_class.from_pretrained(FOLDER, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["mismatched_keys"]
        assert not set(loading["unexpected_keys"]) - {"decoder.weight", "decoder.bias"}
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 24e6
    assert len(AutoTokenizer.from_pretrained(FOLDER)) == model.config.vocab_size


@pytest.mark.compat
def test_stock_calls_load_the_bf16_weights_in_float32():
    """In bf16 `.numpy()` would refuse the states, and training would round each step away."""
    assert {each.dtype for each in load_file(FOLDER / "model.safetensors").values()} == {torch.bfloat16}
    sentences = SentenceTransformer(str(FOLDER))
    models = [each.from_pretrained(FOLDER) for each in (AutoModel, AutoModelForSequenceClassification)]
    models += [pipeline(task, str(FOLDER)).model for task in ("fill-mask", "feature-extraction")]
    for model in (*models, sentences, sentence_transformer(str(FOLDER))):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert models[0](torch.tensor([[2, 100, 3]])).last_hidden_state.detach().numpy().dtype == np.float32
    assert sentences.encode("a", output_value="token_embeddings").numpy().dtype == np.float32


def test_identifiers_are_words_for_the_shipped_tokenizer_in_every_version_of_transformers():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.tokenize("HTTPServer") == tokenizer.tokenize("http server")
    assert tokenizer.tokenize("IntervalArray.get_file") == tokenizer.tokenize("interval array . get _ file")
    assert json.loads((FOLDER / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_card_states_the_measured_results_and_no_local_paths():
    card, summary = (FOLDER / "README.md").read_text("utf-8"), (FOLDER / "training_summary.json").read_text("utf-8")
    data = ModelCard(card).data
    assert (data.license, data.language, data.pipeline_tag) == ("mit", "en", "sentence-similarity")
    assert data.eval_results
    measured = json.loads(summary)["measured"]
    accuracy, retrieval = measured["masked_accuracy"], measured["retrieval"]
    assert accuracy["mini NeoBERT"] >= 0.33 > accuracy["bigram model (the more confident neighbour)"]
    assert retrieval["mini NeoBERT"]["recall@10"] >= 0.97 * retrieval["all-MiniLM-L6-v2, its teacher"]["recall@10"]
    shares = [*accuracy.values(), *measured["masked_accuracy_entries"].values()]
    assert all(f" {share:.1%} |" in card for share in shares)
    assert all(f" {value:.3f} |" in card for scores in retrieval.values() for value in scores.values())
    for text in (card, summary, (FOLDER / "config.json").read_text("utf-8")):
        assert "runs/" not in text and "/home" not in text


@pytest.mark.parametrize("on_card, name", [("mini NeoBERT", "mini"), (f"{TEACHER}, its teacher", TEACHER)])
def test_the_card_and_the_table_beside_the_teacher_have_the_same_figures_at_the_same_length(on_card, name):
    measured = json.loads((FOLDER / "training_summary.json").read_text("utf-8"))["measured"]
    rows = json.loads((FOLDER.parents[2] / "benchmarks/results/embeddings_cpu_float32.json").read_text("utf-8"))["rows"]
    wanted = {"model": name, "max_length": measured["max_seq_length"], "questions": "as they are"}
    (row,) = [{name.lower(): value for name, value in each.items()} for each in rows if wanted.items() <= each.items()]
    found = measured["retrieval"][on_card]
    # on another processor up to 3 of 3,471 queries may find another document
    assert {name: row[name] for name in found} == pytest.approx(found, abs=1e-3)


def test_the_evaluation_on_the_card_is_that_of_the_shipped_weights():
    from pseudo_perplexity import load_masked_model

    from neobert_hf.checkpoints.embedding_models import hash_of_weights

    result = json.loads((FOLDER.parents[2] / "benchmarks/results/evaluation_cpu_float32.json").read_text("utf-8"))
    assert result["weights"] == hash_of_weights(load_masked_model(str(FOLDER)))
    card = (FOLDER / "README.md").read_text("utf-8")
    assert all(f"{task['mean']:.1f} ± {task['standard_deviation']:.1f}" in card for task in result["glue"])


# The first numbers of the vectors that the model had in its training.
VECTORS = {
    "HTTPServer getFile": [1.965198, 0.896791, 1.521693, 0.830201, -0.126066, -2.364356],
    "a": [-1.606033, -6.831760, -0.560785, -2.141306, -5.844484, 3.401787],
    "": [-1.959363, -6.426899, -0.459553, -2.212546, -5.111937, 2.882796],
    "Open a file. " * 80: [1.192623, 1.587147, 1.135969, 1.866709, -0.375566, -2.428120],
}


@pytest.mark.compat
def test_the_embeddings_are_those_of_the_training():
    found = SentenceTransformer(str(FOLDER)).encode(list(VECTORS))
    np.testing.assert_allclose(found[:, :6], list(VECTORS.values()), atol=2e-5)  # float32; the largest number is 8


@pytest.mark.compat
@pytest.mark.parametrize(
    "open_model",
    [
        lambda dtype: open_embedding_model(str(FOLDER), model_kwargs={"dtype": dtype}),
        lambda dtype: SentenceTransformer(str(FOLDER), model_kwargs={"dtype": dtype}),
        lambda dtype: SentenceTransformer(str(FOLDER), model_kwargs={"torch_dtype": str(dtype).removeprefix("torch.")}),
        lambda dtype: SentenceTransformer(str(FOLDER)).to(dtype),
        lambda dtype: getattr(SentenceTransformer(str(FOLDER)), "half" if dtype == torch.float16 else "bfloat16")(),
    ],
    ids=["open_embedding_model", "dtype", "torch_dtype", "to", "half or bfloat16"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stock_calls_compute_the_embeddings_in_half_precision(open_model, dtype):
    model = open_model(dtype)
    assert model.dtype == dtype
    found, expected = (each.encode(list(VECTORS)) for each in (model, SentenceTransformer(str(FOLDER))))
    similarity = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert similarity.min() > 0.999  # 6 blocks that round to 2^-9


FROZEN = {
    "SentenceTransformer": (SentenceTransformer, SentenceTransformerTrainer),
    "SentenceTransformer, frozen": (SentenceTransformer, SentenceTransformerTrainer),
    "SentenceTransformer, our trainer": (SentenceTransformer, ContrastiveTrainer),
    "open_embedding_model": (open_embedding_model, SentenceTransformerTrainer),
}


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [2e-5, 5e-4])
@pytest.mark.parametrize("name", FROZEN)
def test_a_training_keeps_the_vector_of_the_empty_text_opens_equal_and_resumes(name, learning_rate, tmp_path):
    """Near 0, the weights of [CLS] and [SEP] changed their signs in a few steps, and stock modules save no trained weights."""
    (open_model, trainer_class), texts = FROZEN[name], {"q": "open file {}", "a": "return a handle {}"}
    rows = Dataset.from_dict({side: [text.format(i) for i in range(16)] for side, text in texts.items()})
    options = {"max_steps": 10, "save_steps": 5, "logging_steps": 1, "report_to": "none", "use_cpu": True}
    arguments = SentenceTransformerTrainingArguments(str(tmp_path / "run"), learning_rate=learning_rate, **options)
    start, models, curves = SentenceTransformer(str(FOLDER))[2].emb_layer.weight.detach().clone(), [], []
    for checkpoint in (None, str(tmp_path / "run/checkpoint-5")):
        model = open_model(str(FOLDER))
        if name.endswith("frozen"):
            model[2].requires_grad_(False)  # as docs/embeddings.md says
        trainer = trainer_class(model, arguments, rows, loss=MultipleNegativesRankingLoss(model))
        trainer.train(resume_from_checkpoint=checkpoint)
        models.append(model)
        curves.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    model, resumed = models
    is_equal = all(values.equal(resumed.state_dict()[key]) for key, values in model.state_dict().items())
    assert len(curves[0]) == 10 and is_equal == (name != "SentenceTransformer")
    assert curves[0] == curves[1] or name == "SentenceTransformer"
    model.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"))
    assert 15 < np.linalg.norm(model.encode("")) < 25  # 19.4 before
    found, expected = (each.encode(["open file 3", *VECTORS]) for each in (again, model))
    if name == "SentenceTransformer":  # steps below a millionth of each weight, but for those of [CLS] and [SEP]
        has_words = [bool(text) for text in ["some", *VECTORS]]
        np.testing.assert_allclose(found[has_words], expected[has_words], atol=5e-5)  # the largest number is 9
        assert 15 < np.linalg.norm(again.encode("")) < 25
    else:
        np.testing.assert_array_equal(found, expected)
        assert torch.equal(model[2].emb_layer.weight, start)


@pytest.mark.compat
def test_a_second_pass_over_the_same_features_gives_the_same_embeddings():
    """sentence-transformers adds its outputs to the inputs; CachedGISTEmbedLoss gives both to the model again."""
    model = SentenceTransformer(str(FOLDER))
    features = model.preprocess(list(VECTORS))
    with torch.no_grad():
        first, second = (model(features)["sentence_embedding"].clone() for _ in range(2))
    assert torch.equal(first, second)


def test_other_tools_find_pooling_width_and_lengths_where_they_look():
    read = {str(file.relative_to(FOLDER)): json.loads(file.read_text("utf-8")) for file in FOLDER.rglob("*.json")}
    pooling = read["1_Pooling/config.json"]
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens", "include_prompt"]
    kinds = [f"{module['path']}: {module['type'].rpartition('.models.')[2]}" for module in read["modules.json"]]
    assert kinds == [": Transformer", "0_Dense: Dense", "0_WordWeights: WordWeights", "1_Pooling: Pooling"]
    assert read["sentence_bert_config.json"] == {"max_seq_length": 128, "do_lower_case": False}
    width = load_file(FOLDER / "model.safetensors")["model.transformer_encoder.0.ffn.w3.weight"].shape[1]
    assert int(2 * read["config.json"]["intermediate_size"] / 3) == width == 688
    assert read["config.json"]["max_position_embeddings"] == 512


def test_the_code_in_the_folder_is_that_of_the_package(tmp_path):
    """In git there is one copy: the folder has links."""
    AutoModel.from_pretrained(FOLDER).save_pretrained(tmp_path)
    saved = {file.name: file.read_text("utf-8") for file in tmp_path.glob("*.py")}
    assert saved and saved == {file.name: file.read_text("utf-8") for file in FOLDER.glob("*.py")}
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AutoConfig.from_pretrained(FOLDER).auto_map
    if (FOLDER.parents[2] / ".git").exists():
        command = ["git", "ls-files", "-s", FOLDER]
        listed = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True)
        modes = {line.split()[0] for line in listed.stdout.splitlines() if line.endswith(".py")}
        assert modes == {"120000"}  # of a link


def test_an_installed_package_has_every_file_of_the_model(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=FOLDER.parents[2], check=True, capture_output=True)
    installed = tmp_path / "neobert_hf/mini"
    files = {file.relative_to(installed): file.read_bytes() for file in installed.rglob("*.*")}
    assert files == {file.relative_to(FOLDER): file.read_bytes() for file in FOLDER.rglob("*.*")}
    assert not any(file.is_symlink() for file in installed.rglob("*"))
    assert (installed.parent / "py.typed").is_file()
    check_own_code(installed)
    check_own_code(FOLDER)


@pytest.mark.compat
@pytest.mark.slow
def test_a_copy_loads_without_the_package(tmp_path):
    report, texts = verify(shutil.copytree(FOLDER, tmp_path / "copy")), ["one two three", "four"]  # those of verify
    assert report["ok"] and report["own"] == "AutoModelForMaskedLM", report
    inputs = AutoTokenizer.from_pretrained(FOLDER)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = AutoModelForMaskedLM.from_pretrained(FOLDER).eval()(**inputs).logits.numpy()
    for part, expected in (("output", logits), ("embedding", SentenceTransformer(str(FOLDER)).encode(texts))):
        np.testing.assert_allclose(report[part]["first_values"], expected.flatten()[:8], atol=2e-5)
