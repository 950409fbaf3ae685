"""The model inside the package: small, whole, loaded by the Auto classes, and what its card says of it."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import neobert_hf

FOLDER = Path(neobert_hf.MINI)
DEMO = Path(__file__).parents[1] / "examples/demo.py"


def test_it_loads_whole_and_takes_at_most_12_megabytes():
    model, loading = AutoModelForMaskedLM.from_pretrained(FOLDER, output_loading_info=True)
    assert type(model) is neobert_hf.NeoBERTForMaskedLM and model.dtype == torch.bfloat16
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 12e6
    assert len(AutoTokenizer.from_pretrained(FOLDER)) == model.config.vocab_size


def test_it_knows_what_documentation_says():
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    known = {
        "The input tensor of [MASK] (batch_size, sequence_length).": "shape",
        "If True, return a [MASK] of the array.": "copy",
        "Return [MASK] if the object is a string, False otherwise.": "true",
    }
    inputs = tokenizer(list(known), padding=True, return_tensors="pt")
    with torch.inference_mode():
        guesses = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id].argmax(-1)
    assert tokenizer.convert_ids_to_tokens(guesses.tolist()) == list(known.values())


def test_its_card_says_what_was_measured_and_nothing_of_the_machine():
    card, summary = (FOLDER / "README.md").read_text("utf-8"), (FOLDER / "training_summary.json").read_text("utf-8")
    accuracy = json.loads(summary)["measured"]["masked_accuracy"]
    assert accuracy["mini NeoBERT"] >= 0.45 > accuracy["bigrams, the surer neighbour"]
    assert all(f"| {share:.1%}" in card for share in accuracy.values())
    for text in (card, summary, (FOLDER / "config.json").read_text("utf-8")):
        assert "auto_map" not in text and "runs/" not in text and "/home" not in text


def test_the_demo_answers_with_the_network_cut():
    done = subprocess.run(
        [sys.executable, DEMO, "--texts", "A [MASK] of strings.", "Return the [MASK] of the [MASK]."],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "list" in lines[1] and len(lines) == 5  # two sentences, three masks
