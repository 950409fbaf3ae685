"""Fill masks and compare texts with a NeoBERT that was saved with its code, without the package neobert_hf.

    python -m neobert_hf.examples.use_saved_model runs/small

The folder is one that `save_pretrained` or a training of this package has written, with its tokenizer.
"""

import argparse
import sys

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

SENTENCES = [
    "The capital of France is [MASK].",
    "She reads a [MASK] before she sleeps.",
    "Return the number of [MASK] in the list.",
]
TEXTS = ["A file is read line by line.", "The weather is cold today.", "He opens a document and prints every line."]


@torch.no_grad()
def embed(model, tokenizer, texts):
    """Return the mean of each text's last hidden states, (texts, hidden size)."""
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    states = model(**inputs).last_hidden_state  # zero at padding
    return states.sum(1) / inputs["attention_mask"].sum(1, keepdim=True)


def main():
    """Load the folder, fill masks and compare texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Folder of a saved masked language model.")
    folder = parser.parse_args().folder
    sys.modules["neobert_hf"] = None  # importing an installed package fails, so this shows that the folder suffices
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    print(f"{type(model).__module__}.{type(model).__name__}")

    fill_mask = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
    for sentence in SENTENCES:
        guesses = ", ".join(f"{guess['token_str']} {guess['score']:.0%}" for guess in fill_mask(sentence))
        print(f"{sentence:<50} {guesses}")

    vectors = embed(model.model, tokenizer, TEXTS)
    for text, score in zip(TEXTS, torch.nn.functional.cosine_similarity(vectors[:1], vectors)):
        print(f"{score:.2f}  {text}")


if __name__ == "__main__":
    main()
