"""Fill masks with the small model that ships with the package: offline, and in seconds.

python examples/demo.py
python examples/demo.py --texts "Open the [MASK] for reading." "Return a new [MASK]."
"""

from dataclasses import dataclass, field

from transformers import AutoModelForMaskedLM, AutoTokenizer, HfArgumentParser, pipeline

import neobert_hf  # registers the model with the Auto classes

TEXTS = [
    "Return the number of [MASK] in the list.",
    "Raises a ValueError if the [MASK] is not valid.",
    "The input tensor of [MASK] (batch_size, sequence_length).",
    "If True, return a [MASK] of the array.",
    "Open the file in binary [MASK] and return a file object.",
]


@dataclass
class DemoArguments:
    """What to fill in."""

    texts: list[str] = field(default_factory=lambda: TEXTS, metadata={"help": "Sentences, each with [MASK] in it."})


def main():
    """Print the three likeliest fillings of each mask."""
    (arguments,) = HfArgumentParser(DemoArguments).parse_args_into_dataclasses()
    model = AutoModelForMaskedLM.from_pretrained(neobert_hf.MINI)
    tokenizer = AutoTokenizer.from_pretrained(neobert_hf.MINI)
    fill_mask = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
    for text in arguments.texts:
        print(text)
        masks = fill_mask(text)
        for guesses in masks if isinstance(masks[0], list) else [masks]:  # one list for each mask
            print("   " + ", ".join(f"{guess['token_str']} {guess['score']:.0%}" for guess in guesses))


if __name__ == "__main__":
    main()
