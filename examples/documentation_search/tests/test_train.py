"""The recipe and its runner: every setting is accepted, a tiny version runs end to end, and an interrupted one resumes."""

import inspect
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import train
import yaml
from build_mini import build, write_mean
from conftest import SENTENCE, json_lines
from corpus import write_corpus
from distillation import open_student
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from train import HERE, Mean, Stage, read_stages
from transformers import pipeline

from neobert_hf import MINI_MODEL_PATH, NeoBERTConfig, NeoBERTModel
from neobert_hf.embeddings.contrastive import ContrastiveTrainingArguments

RECIPE = yaml.safe_load((HERE / "recipe.yaml").read_text("utf-8"))
TINY = dict(max_rows=60, max_steps=8, warmup_steps=1, tokens_per_batch=48, learning_rate=0.01)
SHAPE = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)


def tiny(name, **changes):
    (stage,) = (stage for stage in read_stages(RECIPE["stages"]) if stage.name == name)
    changes |= TINY | {"shape": stage.shape and SHAPE, "num_hidden_layers": stage.num_hidden_layers and 3}
    return Stage(**asdict(stage) | changes)


@pytest.fixture(scope="module")
def recipe(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    NeoBERTModel(NeoBERTConfig(**SHAPE | {"hidden_size": 48}, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return RECIPE | {"teacher": {"name": str(folder), "max_seq_length": 32}, "max_seq_length": 16}


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    texts = list(dict.fromkeys(" ".join(rng.choice(SENTENCE.split(), rng.integers(2, 9))) for _ in range(400)))
    for i, name in enumerate(("train", "train_texts", "train_documents", "held_out", "held_out_packages")):
        json_lines(folder / f"{name}.jsonl", [{"text": text} for text in texts[i * 60 : i * 60 + 60]])
    for name in ("train", "held_out", "held_out_packages"):
        rows = [{"query": query, "document": document} for query, document in zip(texts[:60], texts[60:])]
        json_lines(folder / f"{name}_pairs.jsonl", rows)
    rows = [{"query": query, "document": texts[300 + i // 3]} for i, query in enumerate(texts[200:260])]
    json_lines(folder / "train_questions.jsonl", rows)
    (folder / "sources.json").write_text(json.dumps({"sources": [{"name": "a", "num_characters": 5_000_000}]}))
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def finished(corpus, recipe, tmp_path_factory):
    """Stages of the recipe of every kind, and means, with a tiny model."""
    stages = [tiny("distilled"), tiny("tuned", start="distilled"), tiny("deeper"), Mean("first", ["tuned", "deeper"])]
    stages += [tiny("longer"), Mean("last", ["first", "longer"])]
    return stages, train.train(recipe, stages, corpus, tmp_path_factory.mktemp("mini"))


def test_the_settings_of_every_stage_are_accepted(tmp_path):
    stages = read_stages(RECIPE["stages"])
    assert len(stages) == 22 and isinstance(stages[-1], Mean)
    for stage in stages:
        if isinstance(stage, Stage):
            names = ("max_steps", "warmup_steps", "learning_rate", "batch_sampler", "seed")
            ContrastiveTrainingArguments(str(tmp_path), **{name: getattr(stage, name) for name in names})
            weights = stage.sampling_weights(dict.fromkeys(stage.pair_files, 9))
            assert min(weights.values()) > 0 and sum(weights.values()) == pytest.approx(1)
            assert stage.shape is None or NeoBERTConfig(**stage.shape)


def test_the_settings_of_the_corpus_are_accepted():
    inspect.signature(write_corpus).bind("runs/documentation", **RECIPE["corpus"])
    assert all((HERE / file).is_file() for file in RECIPE["corpus"]["question_files"])


def test_the_recipe_is_that_of_the_model_in_the_package():
    """The summary of that model lists what its stages had; a mean has numbers of stages there, from 1."""
    stages = read_stages(RECIPE["stages"])
    summary = json.loads((HERE.parents[1] / "src/neobert_hf/mini/training_summary.json").read_text("utf-8"))
    for stage, was in zip(stages, summary["stages"]):
        if isinstance(stage, Mean):
            names = [stages[number - 1].name for number in was["averaged"]]
            assert sorted(names) == sorted(stage.mean)
            continue
        expected = {"steps": stage.max_steps, "muon_learning_rate": stage.learning_rate}
        expected |= {name: value for name, value in asdict(stage).items() if name in was}
        assert {name: was[name] for name in expected} == expected
    assert [stages[number - 1].name for number in summary["averaged"]] == stages[-1].mean


def test_files_of_pairs_divide_the_share_of_pairs_by_a_power_of_their_size():
    stage = next(stage for stage in read_stages(RECIPE["stages"]) if isinstance(stage, Stage))
    stage = Stage(**asdict(stage) | dict(masked_share=0.3, pair_share=0.5, pair_files=[*"ab"], sampling_exponent=0.5))
    weights = stage.sampling_weights({"a": 400, "b": 100})
    expected = {"train_texts": 0.2, "train_documents": 0.3, "a": 0.5 * 20 / 30, "b": 0.5 * 10 / 30}
    assert weights == pytest.approx(expected)


def test_a_recipe_with_an_unknown_setting_or_start_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_step'"):
        read_stages([RECIPE["stages"][0] | {"max_step": 1}])
    with pytest.raises(ValueError, match="distilled begins from paired, which is no earlier stage"):
        read_stages([RECIPE["stages"][0] | {"start": "paired"}])


@pytest.mark.slow
def test_every_stage_trains_encoder_and_decoder_of_one_folder(finished):
    stages, last = finished
    for stage in stages:
        metrics = json.loads((last.parent / stage.name / "finished.json").read_text())["metrics"]
        assert isinstance(stage, Mean) or 0 <= metrics["held_out_cosine_recall@10"] <= 1
    start, after = (load_file(last.parent / "distilled" / name / "model.safetensors") for name in ("start", "."))
    for name, tensor in after.items():
        assert (tensor != start[name]).any()
    assert "decoder.weight" in after
    folder = str(last.parent / "deeper")
    model, fill = SentenceTransformer(folder), pipeline("fill-mask", folder)
    torch.testing.assert_close(model[0].model.encoder.weight.cpu(), fill.model.model.encoder.weight.cpu())
    assert model.encode("the fox").shape == (32,) and len(fill("the [MASK] fox")) == 5


def test_a_stage_with_more_blocks_begins_with_the_vectors_and_masks_of_the_stage_before(finished):
    _, last = finished
    before, start, after = (open_student(last.parent / name, 128) for name in ("tuned", "deeper/start", "deeper"))
    assert start[1].config.num_hidden_layers == after[1].config.num_hidden_layers == 3
    np.testing.assert_array_equal(start[0].encode(SENTENCE), before[0].encode(SENTENCE))
    inputs = before[0].tokenizer(SENTENCE, return_tensors="pt")
    torch.testing.assert_close(*(model(**inputs).logits for _, model in (before, start)), atol=0, rtol=0)
    for block in after[1].model.transformer_encoder[1:]:
        assert block.wo.weight.any() and block.ffn.w3.weight.any()  # the new blocks were trained


def test_targets_stay_those_of_the_first_stage_and_are_fitted_after_a_mean(finished):
    _, last = finished
    first, tuned, longer = (np.load(last.parent / name / "directions.npy") for name in ("distilled", "tuned", "longer"))
    np.testing.assert_array_equal(tuned, first)
    np.testing.assert_allclose(longer.T @ longer, np.eye(32), atol=1e-5)


def test_a_finished_recipe_trains_nothing_again_and_another_recipe_is_refused(finished, corpus, recipe, monkeypatch):
    stages, last = finished
    monkeypatch.setattr(train, "train_stage", lambda *_: pytest.fail("a finished stage trains"))
    assert train.train(recipe, stages, corpus, last.parent) == last
    other = [Stage(**asdict(stages[0]) | {"max_steps": 5}), *stages[1:]]
    with pytest.raises(ValueError, match=r"distilled was trained by another recipe; remove it, or give another"):
        train.train(recipe, other, corpus, last.parent)
    with pytest.raises(ValueError, match="distilled was trained by another recipe"):
        train.train(recipe | {"corpus": RECIPE["corpus"] | {"vocab_size": 99}}, stages, corpus, last.parent)


@pytest.mark.slow
def test_an_interrupted_stage_resumes_with_the_weights_of_an_uninterrupted_one(corpus, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SAVE_STEPS", 4)
    stage = tiny("distilled")
    whole = train.train(recipe, [stage], corpus, tmp_path / "whole")
    part = Path(shutil.copytree(whole, tmp_path / "part/distilled"))
    shutil.rmtree(part / "checkpoint-8")
    for name in ("model.safetensors", "finished.json"):
        (part / name).unlink()
    # another LAPACK may give the directions other signs
    directions = train.main_directions
    monkeypatch.setattr(train, "main_directions", lambda *given: -directions(*given))
    train.train(recipe, [stage], corpus, tmp_path / "part")
    found, expected = (load_file(folder / "model.safetensors") for folder in (part, whole))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)


def test_the_mean_counts_a_model_as_often_as_it_is_named_and_deepens_a_shallow_one(finished, tmp_path):
    _, last = finished
    shallow, deep = (last.parent / name for name in ("tuned", "deeper"))
    write_mean([shallow, shallow, deep], tmp_path)
    mean, first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path, shallow, deep))
    blocks = "model.transformer_encoder."
    for name, tensor in second.items():
        start = first[blocks + "0." + name.removeprefix(blocks)[2:]] if name.startswith(blocks) else first[name]
        if name.startswith((f"{blocks}1", f"{blocks}2")) and name.endswith((".wo.weight", ".w3.weight")):
            start = torch.zeros_like(start)  # new blocks begin without effect
        expected = ((2 * start + tensor) / 3).bfloat16()
        torch.testing.assert_close(mean[name], expected, atol=1e-9, rtol=2**-7)  # one step of bf16: two orders of a sum


def test_the_mini_model_embeds_and_fills_masks_and_its_card_has_the_measurements(finished, corpus, recipe, tmp_path):
    stages, last = finished
    measured = build(last, [asdict(stage) for stage in stages], recipe, corpus, tmp_path)
    model = SentenceTransformer(str(tmp_path))
    assert model.max_seq_length == 16 and model.dtype == torch.float32
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    # [CLS] the fox [SEP], from the same rounded weights
    states = open_student(last, 16)[0].encode("the fox", output_value="token_embeddings").cpu().numpy()
    weights = json.loads((tmp_path / "0_WordWeights/config.json").read_text())["word_weights"]
    mean = np.average(states, axis=0, weights=[weights[token] for token in ("[CLS]", "the", "fox", "[SEP]")])
    projection = load_file(tmp_path / "0_Dense/model.safetensors")["linear.weight"].numpy()
    np.testing.assert_allclose(model.encode("the fox"), projection @ mean, atol=2e-3 * np.abs(states).max())  # bf16
    assert len(pipeline("fill-mask", str(tmp_path))("the [MASK]")) == 5
    names = ("config", "tokenizer", "tokenizer_config")
    config, saved, tokenizer = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    assert config["dtype"] == "float32"
    shipped = Path(MINI_MODEL_PATH)  # of the same form
    assert {file.name for file in tmp_path.glob("*.py")} == {file.name for file in shipped.glob("*.py")}
    assert (tmp_path / "modules.json").read_text() == (shipped / "modules.json").read_text()
    for name in ("config.json", "sentence_bert_config.json", "1_Pooling/config.json", "0_Dense/config.json"):
        assert json.loads((tmp_path / name).read_text()).keys() == json.loads((shipped / name).read_text()).keys()
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert saved["truncation"] is None and saved["padding"] is None
    card = (tmp_path / "README.md").read_text("utf-8")
    assert all(f" {share:.1%} |" in card for share in measured["masked_accuracy"].values())
    assert all(f" {value:.3f} |" in card for scores in measured["retrieval"].values() for value in scores.values())
    assert all(f"| {stage.name} " in card for stage in stages) and "{{" not in card
    assert "1 sources with 5 million characters" in card
