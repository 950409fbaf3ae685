"""Load the twin of the golden masked language model without the package and without remote code, and compare it.

    python -I tests/loads_eurobert.py FOLDER

The last line of output is one line of JSON: the largest error over the largest value of the logits of padded rows, and of the
states of the same texts in one packed row, for which EuroBERT takes `position_ids` and a 4-D mask.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file


def error(actual, wanted):
    actual, wanted = actual.double(), wanted.double()
    return ((actual - wanted).abs().max() / wanted.abs().max()).item()


def main(folder):
    sys.modules["neobert_hf"] = None  # importing the package now fails
    expected = load_file(Path(__file__).with_name("golden") / "expected.safetensors")
    model, info = transformers.AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is transformers.EuroBertForMaskedLM and not model.training, type(model)
    assert not any(info.values()), info
    packed = {name.removeprefix("packed."): tensor for name, tensor in expected.items() if name.startswith("packed.")}
    text_L = (torch.arange(packed["input_ids"].shape[1]) >= packed["cu_seq_lens"][1:, None]).sum(0)
    same_text_11LL = (text_L[:, None] == text_L)[None, None]
    is_real_BL = expected["attention_mask"].bool()
    with torch.no_grad():
        logits = model(expected["input_ids"], attention_mask=expected["attention_mask"]).logits
        marks = {"attention_mask": same_text_11LL, "position_ids": packed["position_ids"]}
        states = model.model(packed["input_ids"], **marks).last_hidden_state
    errors = {
        "padded": error(logits[is_real_BL], expected["mlm_logits"][is_real_BL]),
        "packed": error(states, packed["last_hidden_state"]),
    }
    print(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])
