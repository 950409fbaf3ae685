"""Load a folder or repository in a process without the package, and compare every Auto class with the golden tensors.

    python -I tests/loads_golden.py SOURCE [REVISION]

The last line of output is one line of JSON: for each Auto class the largest error over the largest value. Heads whose weights
are in the source are compared by their logits, others by the last hidden state of their encoder.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

LOGITS = {
    "AutoModelForMaskedLM": ("NeoBERTLMHead", "mlm_logits"),
    "AutoModelForSequenceClassification": ("NeoBERTForSequenceClassification", "classifier_logits"),
}


def error(actual, wanted, where=None):
    actual, wanted = actual.double(), wanted.double()
    if where is not None:
        actual, wanted = actual[where], wanted[where]
    return ((actual - wanted).abs().max() / wanted.abs().max()).item()


def main(source, revision="main"):
    sys.modules["neobert_hf"] = None  # importing the package now fails
    expected = load_file(Path(__file__).with_name("golden") / "expected.safetensors")
    inputs = {name: expected[name] for name in ("input_ids", "attention_mask")}
    is_real = expected["attention_mask"].bool()
    options = {"revision": revision, "trust_remote_code": True}
    config = transformers.AutoConfig.from_pretrained(source, **options)
    assert type(config).__module__.startswith("transformers_modules."), type(config)
    errors = {}
    for auto_class in (name for name in config.auto_map if name.startswith("AutoModel")):
        model = (
            getattr(transformers, auto_class).from_pretrained(source, **options, ignore_mismatched_sizes=True).eval()
        )
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        own, name = LOGITS.get(auto_class, (None, None))
        with torch.no_grad():
            if own in config.architectures:
                where = is_real if name == "mlm_logits" else None
                errors[auto_class] = error(model(**inputs).logits, expected[name], where)
            else:
                states = model.base_model(**inputs).last_hidden_state
                errors[auto_class] = error(states, expected["last_hidden_state"], is_real)
    print(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])
