# %% [markdown]
"""
# Load NeoBERT and embed texts

NeoBERT is a text encoder: it reads a text and returns a vector for each token. This notebook loads the published model, fills
masks, and compares texts by their embeddings. It runs on a CPU in about two minutes, most of which is the download.
"""

# %%
# Write the owner of the repository on GitHub in the place of OWNER.
# %pip install -q "neobert_hf[embed] @ git+https://github.com/OWNER/neobert_hf" matplotlib

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

import neobert_hf

# %% [markdown]
"""
## Load

`import neobert_hf` registers the model with transformers, so the Auto classes open it, and no code of the Hub runs.
"""

# %%
tokenizer = AutoTokenizer.from_pretrained("chandar-lab/NeoBERT")
model = AutoModelForMaskedLM.from_pretrained("chandar-lab/NeoBERT").eval()
print(f"{model.num_parameters():,} parameters, {model.config.num_hidden_layers} layers of {model.config.hidden_size}")

# %% [markdown]
"""
## Fill a mask

The model was trained to guess hidden words from the words on both sides.
"""

# %%
fill_mask = pipeline("fill-mask", model=model, tokenizer=tokenizer)
guesses = fill_mask("Return the number of [MASK] in the list.")
pd.DataFrame(guesses)[["token_str", "score", "sequence"]].round({"score": 3})

# %% [markdown]
"""
## A vector for each token

Short texts of a batch are filled with padding. The model computes nothing there, and its states are zero.
"""

# %%
texts = ["An encoder reads both ways.", "So does this model, whose texts may be longer."]
inputs = tokenizer(texts, padding=True, return_tensors="pt")
with torch.inference_mode():
    states = model.model(**inputs).last_hidden_state
means = states.sum(1) / inputs["attention_mask"].sum(1, keepdim=True)
print("a vector for each token:", tuple(states.shape), "and for each text:", tuple(means.shape))

# %% [markdown]
"""
## Compare texts

To compare texts, take a model that was trained for it. The package contains a small one, which knows documentation of Python
packages. For another, give `SentenceTransformer` its name on the Hub. A similarity near 1 means: almost the same.
"""

# %%
sentences = [
    "Open a file and read its lines.",
    "Return the lines of a document.",
    "Wait for some seconds.",
    "Pause the program for a while.",
    "Sort a list by a key.",
]
embedder = SentenceTransformer(neobert_hf.MINI_MODEL_PATH)
vectors = embedder.encode(sentences)
similarities = embedder.similarity(vectors, vectors)

# %%
figure, axes = plt.subplots(figsize=(7, 4))
axes.imshow(similarities, cmap="Blues", vmin=0, vmax=1)
axes.set_yticks(range(len(sentences)), [f"{i + 1}  {text}" for i, text in enumerate(sentences)])
axes.set_xticks(range(len(sentences)), range(1, len(sentences) + 1))
for row in range(len(sentences)):
    for column in range(len(sentences)):
        score = float(similarities[row, column])
        axes.text(column, row, f"{score:.2f}", ha="center", va="center", color="white" if score > 0.6 else "black")
axes.set_title("Similarity of the texts")
figure.tight_layout()
