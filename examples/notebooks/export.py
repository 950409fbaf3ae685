# %% [markdown]
"""
# Export a model to ONNX

An exported folder runs without PyTorch: in ONNX Runtime, in a browser, in servers. This notebook exports the small embedding
model of the package, also with 8-bit weights, and compares answers and speed. It runs on a CPU in about two minutes.
"""

# %%
# Write the owner of the repository on GitHub in the place of OWNER.
# %pip install -q "neobert_hf[embed,onnx] @ git+https://github.com/OWNER/neobert_hf" matplotlib

# %%
import statistics
import timeit

import matplotlib.pyplot as plt
import pandas as pd
from sentence_transformers import SentenceTransformer

import neobert_hf
from neobert_hf.export import OnnxModel, export_model

# %% [markdown]
"""
## Export

For a model of your own, give its folder or its name on the Hub. The export compares every file with PyTorch, and fails if they
differ too much. The folder `exported` must be new or empty.
"""

# %%
report = export_model(neobert_hf.MINI_MODEL_PATH, "exported", to=["onnx"], int8=True)
rows = [
    (name, found["bytes"] / 1e6, max(found.get("errors", {}).values(), default=None), found.get("smallest_cosine"))
    for name, found in report["files"].items()
]
pd.DataFrame(rows, columns=["file", "MB", "largest error", "smallest cosine"]).round({"MB": 1})

# %% [markdown]
"""
## Use the folder

`OnnxModel` needs onnxruntime, numpy and tokenizers, and neither PyTorch nor transformers.
"""

# %%
texts = ["Open a file.", "Wait for some seconds.", "Sort a list by a key."]
models = {
    "PyTorch": SentenceTransformer(neobert_hf.MINI_MODEL_PATH, device="cpu"),
    "ONNX": OnnxModel("exported"),
    "ONNX, 8 bits": OnnxModel("exported", dtype="int8"),
}
vectors = {name: model.encode(texts, normalize_embeddings=True) for name, model in models.items()}

# %% [markdown]
"""
## Compare

The similarity of each vector to that of PyTorch: 1 means equal. With 8 bits it is a little smaller.
"""

# %%
same = {name: (found * vectors["PyTorch"]).sum(axis=1) for name, found in vectors.items()}
pd.DataFrame(same, index=texts).round(4)

# %%
times = {
    name: 1000 * statistics.median(timeit.repeat(lambda model=model: model.encode(texts[0]), number=1, repeat=30))
    for name, model in models.items()
}
figure, axes = plt.subplots(figsize=(6, 1.8))
axes.bar_label(axes.barh(list(times), list(times.values())), fmt="%.1f", padding=3)
axes.margins(x=0.15)
axes.invert_yaxis()
axes.set_title("Milliseconds for one sentence")
figure.tight_layout()
