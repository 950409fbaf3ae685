"""The losses of held-out documents are those of a plain pass, one document at a time."""

import pytest
import torch
from held_out import held_out_losses
from pretraining_runs import SMALL

from neobert_hf.pretraining import RECIPES, PackedMLMCollator, build_model


def test_held_out_losses_are_those_of_a_plain_pass(tokenizer):
    """One document at a time, with the masks that the labels of the collator give."""
    model = build_model(RECIPES["paper"], tokenizer, SMALL).eval()
    texts = ["the quick brown fox jumps over", "lazy dog", "and then it sleeps in a warm red house by old sea"]
    texts.append("a [PAD] b")
    found = held_out_losses(model, tokenizer, texts, 12, batch_size=2)
    for number, text in enumerate(texts):
        ids = torch.tensor(tokenizer(text, truncation=True, max_length=12)["input_ids"])
        row = PackedMLMCollator(tokenizer, 0.2)([{"input_ids": ids, "attention_mask": ids >= 0, "mask_seed": number}])
        is_masked = row["labels"][0] != -100
        logits = model(row["input_ids"]).logits[0, is_masked]
        expected = -logits.log_softmax(-1)[torch.arange(len(logits)), ids[is_masked]].mean().item()
        assert found["loss"][number] == pytest.approx(expected, abs=1e-5, nan_ok=True)
        assert found["num_masked"][number] == is_masked.sum()
        assert found["num_correct"][number] == (logits.argmax(-1) == ids[is_masked]).sum()
    assert found["num_tokens"] == [len(tokenizer(text, add_special_tokens=False)["input_ids"][:10]) for text in texts]
    assert found["num_characters"][:2] == [30, 8] and 20 < found["num_characters"][2] < len(texts[2])
