"""What the mini model answers in torch on the processor that runs this file: float32, bf16, and the copy in int8.

python tests/processors/model_answers.py OUT.npz
"""

import sys

import numpy as np
import torch
from transformers import AutoModel

import neobert_hf

IDS = torch.tensor([[101, *range(200, 230), 102]])

model = AutoModel.from_pretrained(neobert_hf.MINI_MODEL_PATH, dtype=torch.float32)
models = {"float32": model, "copy": neobert_hf.inference_copy(model)}
models["int8"] = neobert_hf.inference_copy(model, int8=True)
models["bf16"] = AutoModel.from_pretrained(neobert_hf.MINI_MODEL_PATH, dtype=torch.bfloat16)
with torch.inference_mode():
    found = {name: each(IDS).last_hidden_state[0].float().numpy() for name, each in models.items()}
np.savez(sys.argv[1], best_dtype=str(neobert_hf.best_dtype()), **found)
