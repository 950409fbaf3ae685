"""What a training shows on a terminal and in a file, and what loading says of weights that are missing."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from neobert_hf.finetuning import Classifier
from neobert_hf.runs import limit_threads
from neobert_hf.runs.progress import without_bars

TEXTS, LABELS = ["the fox red", "a dog old", "red sea", "old sea"] * 4, ["red", "old"] * 8


@pytest.mark.slow
def test_a_file_has_a_line_for_each_epoch_or_log_and_the_history_is_that_of_trainer(start, tmp_path, capfd):
    options = {"use_cpu": True, "num_train_epochs": 3, "logging_steps": 1, "output_dir": str(tmp_path)}
    Classifier(start, 16).fit(TEXTS, LABELS, (TEXTS, LABELS), per_device_train_batch_size=8, **options)
    out, err = capfd.readouterr()
    history = json.loads(next(tmp_path.glob("checkpoint-*/trainer_state.json")).read_text())["log_history"]
    for epoch in (1, 2, 3):
        of_epoch = [entry for entry in history if epoch - 1 < entry["epoch"] <= epoch]
        losses, (scores,) = [e["loss"] for e in of_epoch if "loss" in e], [e for e in of_epoch if "eval_f1" in e]
        line = rf"epoch {epoch} of 3: loss {sum(losses) / 2:.4g}; validation loss {scores['eval_loss']:.4g}, accuracy"
        assert len(losses) == 2 and re.search(line, out), line
    assert not re.search(r"\{'|LOAD REPORT|%", out + err)
    Classifier(start, 16).fit(TEXTS, LABELS, use_cpu=True, max_steps=4, logging_steps=2)
    assert re.findall(r"(.*): loss", capfd.readouterr().out) == ["step 2 of 4", "step 4 of 4"]


def test_threads_are_at_most_the_cores_of_the_process_unless_their_number_is_given(monkeypatch):
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")  # which joblib counts as it does affinity and quota
    numbers = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    limit_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads()
    assert numbers == [1]


@pytest.mark.compat
@pytest.mark.parametrize("fault", ["nothing", "missing"])
def test_a_new_head_is_loaded_without_a_report_and_a_fault_of_the_encoder_is_told(bert, tmp_path, caplog, fault):
    folder, name = tmp_path / "bert", "bert.encoder.layer.0.output.dense.weight"
    model = AutoModelForSequenceClassification.from_pretrained(bert)
    model.bert.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    stored = next(each for each in weights if name.endswith(each))
    if fault == "missing":
        weights["encoder.layer.7.output.dense.weight"] = weights.pop(stored)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    caplog.clear()
    with caplog.at_level("WARNING"), without_bars(is_head_new=True):
        AutoModelForSequenceClassification.from_pretrained(folder, ignore_mismatched_sizes=True)
    assert (name in caplog.text) == (fault != "nothing") and (fault != "nothing" or not caplog.text)
