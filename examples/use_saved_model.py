"""Fill masks and search with a NeoBERT that was saved with its code, without the package neobert_hf.

python examples/demo_documentation.py --output_dir runs/demo        (saves the model and the documents to search)
python examples/use_saved_model.py runs/demo
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

SENTENCES = [
    "Return the number of [MASK] in the list.",
    "Raises a ValueError if the [MASK] is not valid.",
    "The input tensor of [MASK] (batch_size, sequence_length).",
    "A string with the [MASK] of the file to open.",
    "If True, return a [MASK] of the array.",
]
QUESTIONS = [
    "read a file line by line",
    "compute the mean of a tensor along a dimension",
    "configuration of a transformer model",
]


@torch.no_grad()
def embed(model, tokenizer, texts, batch_size=32):
    """Return the normalised mean of each text's last hidden states, (N, D)."""
    rows = []
    for start in tqdm(range(0, len(texts), batch_size), desc="embedding", unit=" batches", disable=len(texts) < 100):
        batch = texts[start : start + batch_size]
        inputs = tokenizer(batch, padding=True, truncation=True, max_length=128, return_tensors="pt")
        states = model(**inputs).last_hidden_state  # zero at padding
        rows.append(states.sum(1) / inputs["attention_mask"].sum(1, keepdim=True))
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


def main(folder):
    """Load the folder, fill masks and search."""
    sys.modules["neobert_hf"] = None  # makes importing an installed package fail
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    print(f"   {type(model).__module__}.{type(model).__name__}")

    print("5. Filling masks")
    fill_mask = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
    for sentence in SENTENCES:
        guesses = ", ".join(f"{guess['token_str']} {guess['score']:.0%}" for guess in fill_mask(sentence))
        print(f"   {sentence:<62} {guesses}")

    print("6. Searching the documentation by mean-pooled embeddings")
    entries = json.loads(Path(folder, "entries.json").read_text("utf-8"))
    vectors = embed(model.model, tokenizer, [f"{entry['name']}\n{entry['text']}" for entry in entries])
    centre = vectors.mean(0)  # the component that all entries share does not help to rank them
    for question in QUESTIONS:
        query = embed(model.model, tokenizer, [question])[0]
        scores = torch.nn.functional.cosine_similarity(vectors - centre, (query - centre)[None])
        print(f"   {question}")
        for score, index in zip(*scores.topk(3)):
            first_line = entries[index]["text"].splitlines()[0]
            print(f"      {score:.2f}  {entries[index]['name']}: {first_line[:90]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Folder that examples/demo_documentation.py has written.")
    folder = parser.parse_args().folder
    if missing := [name for name in ("config.json", "entries.json") if not Path(folder, name).is_file()]:
        sys.exit(
            f"{folder} has no {' and no '.join(missing)}; run examples/demo_documentation.py --output_dir {folder} first"
        )
    main(folder)
