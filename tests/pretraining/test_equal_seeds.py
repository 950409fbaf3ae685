"""What equal seeds make equal on another kind of CPU, here one whose AVX-512 is hidden."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import neobert_hf

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SCRIPT = """
import hashlib, json, random, sys, torch
from transformers import set_seed
from neobert_hf.data import tokenizer_hash, train_wordpiece
from neobert_hf.pretraining import Corpus, PackedMLMCollator, PackedRows, Recipe, build_model, tokenize, write_packing_plan

def hash_of(tensors):
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()

if __name__ == "__main__":
    folder = sys.argv[1]
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 9))) for _ in range(400)]
    with open(f"{folder}/a.txt", "w") as file:
        file.writelines(" ".join(rng.choices(words, k=rng.randint(1, 90))) + "\\n" for _ in range(300))
    corpus = Corpus([f"{folder}/a.txt"], sample_by="line")
    tokenizer = train_wordpiece(corpus, 300)
    documents = tokenize(corpus, tokenizer, f"{folder}/documents", tasks=1, workers=1)
    rows = PackedRows(documents, write_packing_plan(documents, 512, seed=1), 200)
    collate = PackedMLMCollator(tokenizer, random_replace_prob=0.1, mask_replace_prob=0.8)
    batches = [collate([rows[number]]) for number in range(200)]
    set_seed(1)
    small = "hidden_size=128,num_hidden_layers=3,num_attention_heads=2,intermediate_size=256"
    model = build_model(Recipe(), tokenizer, small)
    print(json.dumps({
        "capability": torch.backends.cpu.get_cpu_capability(),
        "tokenizer": tokenizer_hash(tokenizer),
        "documents": [task["sha256"] for task in documents.manifest["tasks"]],
        "rows": hashlib.sha256(str([rows[number] for number in range(200)]).encode()).hexdigest(),
        "masks": hash_of(batch[name] for batch in batches for name in ("input_ids", "labels")),
        "initial weights": hash_of(model.state_dict().values()),
    }))
"""


def hashes(folder, **environment):
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(neobert_hf.__file__).parents[1])} | environment
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_tokenizer_tokens_rows_masks_and_initial_weights_are_equal_without_avx512(tmp_path):
    default = hashes(tmp_path / "default", OMP_NUM_THREADS="1")
    other = hashes(tmp_path / "avx2", OMP_NUM_THREADS="2", **AVX2)
    if default.pop("capability") == "AVX512":
        assert other["capability"] == "AVX2"
    assert {name: other[name] for name in default} == default
