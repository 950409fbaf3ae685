# %% [markdown]
"""
# Measure NeoBERT on a GPU

This notebook tests and measures the library on one GPU, in at most 9 minutes, compares the speed with expected figures, and packs
the results. In Colab choose *Runtime, Change runtime type, T4 GPU* first; it is free.
"""

# %%
# Write the owner of the repository on GitHub in the place of OWNER.
# %pip install -q "neobert_hf[train,embed] @ git+https://github.com/OWNER/neobert_hf" pytest
# !git clone -q https://github.com/OWNER/neobert_hf

# %%
import shutil
from pathlib import Path

# %% [markdown]
"""
## Measure

The command ends with a table of measured and expected figures, and with one line for each stage. A stage that fails does not stop
the others.
"""

# %%
# !make -C neobert_hf measure-gpu

# %% [markdown]
"""
## The tables

One folder for each kind of GPU.
"""

# %%
RESULTS = Path("neobert_hf/benchmarks/results/gpu")
tables = sorted(RESULTS.glob("*/*.md"))
for table in tables:
    print(f"{table.parent.name}, {table.stem}\n\n{table.read_text('utf-8')}")
if not tables:
    print("No results: this machine has no GPU, or the command above did not end; it says why.")

# %% [markdown]
"""
## Pack the results

`gpu_results.zip` is in the folder of this notebook; in Colab, in the panel *Files* on the left. The page
`docs/performance.md` says how to send it.
"""

# %%
if RESULTS.is_dir():
    print("packed:", shutil.make_archive("gpu_results", "zip", RESULTS))
else:
    print("Nothing to pack.")

# %% [markdown]
"""
## On your own machine

With an A100, an H100 or another NVIDIA GPU, and a driver for the CUDA of your torch, four commands do the same:

```bash
git clone https://github.com/OWNER/neobert_hf
cd neobert_hf
pip install -e ".[train,embed]" pytest
make measure-gpu
```

To measure FlashAttention too, load a prebuilt kernel once (`docs/loading.md`), or `pip install flash-attn --no-build-isolation`,
before the last command: "auto" chooses it then.
"""
