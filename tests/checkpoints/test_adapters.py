"""Adapters: they learn, change nothing else, merge, switch, and know their base model."""

import json
import os
import re
import shutil

import finetune_lora
import peft
import pytest
import torch
from conftest import json_lines, run_main
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, pipeline

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.checkpoints.adapters import lora_config, open_adapter, save_adapter

IDS, LABELS = torch.arange(5, 37).reshape(8, 4), torch.tensor([0, 1] * 4)
NAMES = {0: "no", 1: "yes"}


@pytest.fixture
def base(checkpoint, tmp_path):
    NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def trained_adapter(base, seed, labels=LABELS, steps=20):
    """A model with an adapter, and its losses; the seed decides the new head and the adapter."""
    torch.manual_seed(seed)
    options = {"id2label": NAMES, "problem_type": "single_label_classification"}
    model = AutoModelForSequenceClassification.from_pretrained(base, **options)
    model = peft.get_peft_model(model, lora_config("SEQ_CLS", r=4, lora_alpha=8))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], 1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), losses


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_an_adapter_learns_and_changes_nothing_but_itself_and_the_head(base):
    model, losses = trained_adapter(base, 1)
    assert losses[-1] < losses[0] / 10
    saved = load_file(base / "model.safetensors")
    encoder = {name: weight for name, weight in model.get_base_model().model.named_parameters() if "lora_" not in name}
    assert len(encoder) > 10
    for name, weight in encoder.items():
        assert torch.equal(weight, saved["model." + name.replace("base_layer.", "")]), name
    changed = {name.split(".")[-3] for name, x in model.named_parameters() if x.requires_grad and "lora_" not in name}
    assert changed == {"modules_to_save"}


def test_two_adapters_of_one_model_switch_with_their_heads(base, tmp_path):
    models = {"first": trained_adapter(base, 1)[0], "second": trained_adapter(base, 2, 1 - LABELS)[0]}
    for name, model in models.items():
        save_adapter(model, tmp_path / name)
    (tmp_path / "first/README.md").write_text("my words")
    save_adapter(models["first"], tmp_path / "first")  # PEFT would change the card
    assert (tmp_path / "first/README.md").read_text() == "my words"
    model.get_base_model().save_pretrained(tmp_path / "whole")
    with pytest.raises(FileExistsError, match=r"holds config\.json of a whole model"):
        save_adapter(model, tmp_path / "whole")
    both = open_adapter(AutoModelForSequenceClassification, tmp_path / "first")
    both.load_adapter(tmp_path / "second", adapter_name="second")
    for adapter, name in (("second", "second"), ("default", "first"), ("second", "second")):
        both.set_adapter(adapter)
        assert torch.equal(logits(both), logits(models[name]))


def test_an_opened_adapter_knows_its_classes_in_every_dtype_of_the_base(base, tmp_path):
    model, _ = trained_adapter(base, 1)
    save_adapter(model, tmp_path / "adapter")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        again = open_adapter(AutoModelForSequenceClassification, tmp_path / "adapter", dtype=dtype)
        assert again.config.id2label == NAMES and again.config.problem_type == "single_label_classification"
        if dtype == torch.float32:
            assert torch.equal(logits(again), logits(model))


def test_an_adapter_that_trains_the_embedding_is_known_by_the_embedding_below(base, tmp_path):
    model = NeoBERTForSequenceClassification.from_pretrained(base)
    model = peft.get_peft_model(model, lora_config("SEQ_CLS", modules_to_save=["model.encoder"]))
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    save_adapter(model, tmp_path / "adapter")
    again = open_adapter(AutoModelForSequenceClassification, tmp_path / "adapter")
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)


CHANGES = {"weights": {}, "width": {"hidden_size": 64}, "vocabulary": {"vocab_size": 200}, "trained again": None}


@pytest.mark.parametrize("name", CHANGES)
def test_an_adapter_of_another_base_model_is_refused_in_one_line(base, tmp_path, name):
    save_adapter(trained_adapter(base, 1, steps=1)[0], tmp_path / "adapter")
    if CHANGES[name] is None:
        model = AutoModelForSequenceClassification.from_pretrained(base)
        with torch.no_grad():
            for weight in model.model.transformer_encoder.parameters():
                weight += 1e-2 * torch.randn_like(weight)
    else:
        model = NeoBERTForMaskedLM(NeoBERTConfig.from_pretrained(base, **CHANGES[name]))
    model.save_pretrained(tmp_path / "other")
    words = r"adapter was trained on .*base, and .*other is another model; give the forme"
    with pytest.raises(ValueError, match=words) as error:
        open_adapter(AutoModelForSequenceClassification, tmp_path / "adapter", str(tmp_path / "other"))
    assert len(str(error.value).splitlines()) == 1


def test_a_base_model_that_was_moved_is_given_by_its_place_and_a_folder_without_record_is_refused(base, tmp_path):
    model, _ = trained_adapter(base, 1, steps=1)
    save_adapter(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "of_peft")
    os.rename(base, tmp_path / "moved")
    for name, error, words in (
        ("adapter", ValueError, r"base is no folder; give an existing folder"),
        ("of_peft", FileNotFoundError, r"of_peft has no base\.json; give the folder of an adapter that save_adapter"),
    ):
        with pytest.raises(error, match=words):
            open_adapter(AutoModelForSequenceClassification, tmp_path / name)
    again = open_adapter(AutoModelForSequenceClassification, tmp_path / "adapter", str(tmp_path / "moved"))
    assert torch.equal(logits(again), logits(model))


@pytest.fixture
def files(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "base")
    starts = ["the fox", "a dog", "it jumps", "lazy sea", "warm house"]
    words = (("red", "R"), ("old", "O"))
    rows = [{"text": f"{start} {word}", "label": name} for start in starts for word, name in words]
    json_lines(tmp_path / "train.jsonl", rows * 20)
    json_lines(tmp_path / "test.jsonl", rows)
    return tmp_path


def command(files, *more):
    return [*("--use_cpu", "true", "--report_to", "none", "--output_dir", files / "out"), *more]


def predictions(folder):
    return (folder / "predictions.csv").read_text("utf-8").splitlines()


@pytest.mark.slow
def test_the_script_trains_an_adapter_that_predicts_again_and_a_merged_model(files):
    data = ("--train_file", files / "train.jsonl", "--test_file", files / "test.jsonl", "--num_train_epochs", "2")
    printed = run_main(
        finetune_lora,
        *command(files, "--model_name_or_path", files / "base", *data, "--merge", "--max_seq_length", "16"),
    )
    assert re.search(r"\nthis model +1.0000 ", printed)
    assert "open the adapter by neobert_hf.open_adapter(" in printed
    assert [row.split(",")[2] for row in predictions(files / "out")[1:]] == ["R", "O"] * 5
    for folder in (files / "out", files / "out/merged"):
        assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 16
    classify = pipeline("text-classification", str(files / "out/merged"))
    assert [found["label"] for found in classify(["the dog red", "the dog old"])] == ["R", "O"]
    before = predictions(files / "out")
    test = ("--test_file", files / "test.jsonl", "--output_dir", files / "again")
    run_main(finetune_lora, *command(files, "--model_name_or_path", files / "out", *test))
    assert predictions(files / "again") == before
