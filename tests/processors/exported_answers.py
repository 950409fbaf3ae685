"""What exported folders answer on the processor that runs this file, by ONNX Runtime and numpy alone.

    python tests/processors/exported_answers.py FOLDERS OUT.npz

FOLDERS holds `embedder`, `earlier` (the same model with an int8 file of an earlier version, with signed weights) and `tagger`.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.modules.update(torch=None, transformers=None)  # whose import takes a minute under emulation

from neobert_hf.export import OnnxModel  # noqa: E402

# With signed weights, the sums of their products saturate without VNNI: vectors had cosines of 0.46 to 0.77 to those with VNNI.
TEXTS = [
    'AutoModelForSequenceClassification.from_pretrained("runs/merged")',
    "| Which documents are held out? | `pretraining/documents.py` | `Documents.split` |",
    "from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig",
    "How long does shipping take?",
]
SENTENCE = "the quick brown fox jumps over lazy dog"


def main(folders: Path, out: Path) -> None:
    """Write the vectors of texts by folder and dtype, and the entities of `SENTENCE` as JSON."""
    # float32 is emulated ten times as slowly as int8
    found = {"float32": OnnxModel(folders / "embedder", num_threads=1).encode(SENTENCE)}
    for folder in ("embedder", "earlier"):
        model = OnnxModel(folders / folder, "int8", num_threads=1)
        found[folder] = model.encode(TEXTS, batch_size=1, normalize_embeddings=True)
    entities = OnnxModel(folders / "tagger", num_threads=1).predict(SENTENCE)
    scores = [entity.pop("score") for entity in entities]
    np.savez(out, entities=json.dumps(entities), scores=scores, **found)


main(*map(Path, sys.argv[1:]))
