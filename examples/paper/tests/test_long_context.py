"""Long context: which model, texts and positions each scaling gets, and the direction of the effect where theory fixes it."""

import json

import evaluate_long_context
import pytest
import torch
from conftest import SENTENCE, json_lines, run_main
from pseudo_perplexity import MaskedText, masked_losses, positions_to_mask

from neobert_hf import NeoBERTForMaskedLM


@pytest.fixture
def command(published, tmp_path):
    rows = [{"text": " ".join([SENTENCE] * 2) if i % 2 else "the quick fox"} for i in range(4)]
    texts = json_lines(tmp_path / "long.jsonl", rows)
    return [
        *("--files", texts, "--model_name_or_path", published, "--output_dir", tmp_path / "out"),
        *("--trained_length", "8", "--lengths", "8", "24", "--positions", "5"),
    ]


def test_every_value_is_that_of_the_model_loaded_with_the_scaling(command, tokenizer, tmp_path):
    run_main(evaluate_long_context, *command)
    result = json.loads((tmp_path / "out/long_context.json").read_text())
    assert result["texts"] == 2  # those that reach 24 tokens
    assert [(p["scaling"], p["length"]) for p in result["points"][2:4]] == [("linear", 8), ("linear", 24)]
    ids = tokenizer(" ".join([SENTENCE] * 2), truncation=True, max_length=24)["input_ids"]
    for point in result["points"]:
        if point["length"] == 24:
            rope = {
                "none": {"rope_type": "default"},
                "linear": {"rope_type": "linear", "factor": 3.0},
                "dynamic": {"rope_type": "dynamic", "factor": 1.0},
                "yarn": {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8},
            }[point["scaling"]]
            options = {"rope_parameters": rope, "max_position_embeddings": 8}
            model = NeoBERTForMaskedLM.from_pretrained(command[3], **options).eval()
            documents = [MaskedText(ids, positions_to_mask(ids, tokenizer.all_special_ids, 5, seed)) for seed in (0, 1)]
            losses = torch.tensor(list(masked_losses(model, tokenizer.mask_token_id, documents)))
            tolerance = 2e-2  # the command computes in bfloat16 where the processor has it
            assert point["pseudo_perplexity"] == pytest.approx(losses.mean().exp().item(), rel=tolerance)
            assert point["low"] < point["pseudo_perplexity"] < point["high"]
    assert (tmp_path / "out/long_context.png").stat().st_size > 5_000


def test_an_unknown_scaling_and_texts_that_are_too_short_are_refused(command, capsys):
    with pytest.raises(SystemExit):
        run_main(evaluate_long_context, *command, "--scalings", "none", "ntk")
    assert "scalings: ntk is not one of none, linear, dynamic, yarn" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no text has 64 tokens; give longer texts"):
        run_main(evaluate_long_context, *command, "--lengths", "64")
