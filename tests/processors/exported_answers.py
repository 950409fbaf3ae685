"""What exported folders answer on the processor that runs this file, by ONNX Runtime and numpy alone.

    python tests/processors/exported_answers.py FOLDERS OUT.npz

FOLDERS holds `embedder`, `earlier` (the same model with an int8 file of an earlier version, with signed weights) and `tagger`.
"""

import json
import sys
from pathlib import Path

import numpy as np

from neobert_hf.export import OnnxModel

# Code, a table, a path and numbers: texts whose products of signed weights saturate without VNNI.
TEXTS = [
    'reference.check(saved / "model.onnx", shifted(share), kind)',
    "| zipfile | 0.742 | 8,113 | `asyncio.run()` |",
    "/usr/lib/python3/email-4.1/curses.so",
    "-12.5 884 3.07 -650.2 0.001 71",
]
SENTENCE = "the quick brown fox jumps over lazy dog"


def main(folders: Path, out: Path) -> None:
    """Write the vectors of `TEXTS` by folder and dtype, and the entities of `SENTENCE` as JSON."""
    found = {}
    for folder, dtype in (("embedder", "fp32"), ("embedder", "int8"), ("earlier", "int8")):
        model = OnnxModel(folders / folder, dtype, num_threads=1)
        found[f"{folder} {dtype}"] = model.encode(TEXTS, normalize_embeddings=True)
    entities = OnnxModel(folders / "tagger", num_threads=1).predict(SENTENCE)
    scores = [entity.pop("score") for entity in entities]
    np.savez(out, entities=json.dumps(entities), scores=scores, **found)


main(*map(Path, sys.argv[1:]))
