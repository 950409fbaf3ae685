"""Write the golden tensors: a tiny checkpoint in the published layout, and what it must compute.

    python tests/golden/generate.py OUT

An independent oracle in float64, from the paper's equations and the published tensor layout (fused qkv by head, RoPE on pairs,
SwiGLU w12 and w3, RMSNorm before each part). It imports nothing from the package. The authors' published training code gives
identical outputs. With torch 2.13 on a CPU, this script writes the files in this folder again byte by byte.
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, FFN, VOCAB, LENGTH, LABELS = 64, 3, 4, 128, 512, 24, 3  # FFN: 2/3 of intermediate_size
EPS, THETA = 1e-5, 10000.0

CONFIG = {  # all keys of the published file, also those that nothing reads
    "auto_map": {
        "AutoConfig": "model.NeoBERTConfig",
        "AutoModel": "model.NeoBERT",
        "AutoModelForMaskedLM": "model.NeoBERTLMHead",
        "AutoModelForSequenceClassification": "model.NeoBERTForSequenceClassification",
    },
    "classifier_init_range": 0.02, "decoder_init_range": 0.02, "dim_head": HIDDEN // HEADS, "embedding_init_range": 0.02,
    "hidden_size": HIDDEN, "intermediate_size": 192,
    "kwargs": {"classifier_init_range": 0.02, "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
               "trust_remote_code": True},
    "max_length": 128, "model_type": "neobert", "norm_eps": EPS, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "pad_token_id": 0, "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
    "torch_dtype": "float32", "transformers_version": "4.48.2", "trust_remote_code": True, "vocab_size": VOCAB,
}  # fmt: skip


def rms_norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotate(x, positions):
    """Rotate the pairs (2i, 2i+1) of the last axis by position * THETA^(-2i/d); x is [L, H, d]."""
    d = x.shape[-1]
    inverse = THETA ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    angle = positions[:, None].to(x.dtype) * inverse[None]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def encode(w, ids, keep, positions):
    """Return the residual streams, the attention probabilities and the last state of one row; `keep` marks real tokens."""
    d = HIDDEN // HEADS
    x = w["model.encoder.weight"][ids]
    states, attentions = [x], []
    for i in range(LAYERS):
        p = f"model.transformer_encoder.{i}."
        h = rms_norm(x, w[p + "attention_norm.weight"])
        qkv = (h @ w[p + "qkv.weight"].T).view(len(ids), HEADS, 3 * d)
        q, k, v = qkv[..., :d], qkv[..., d : 2 * d], qkv[..., 2 * d :]
        q, k = rotate(q, positions), rotate(k, positions)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(d)
        probs = scores.masked_fill(~keep[None, None, :], float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", probs, v).reshape(len(ids), -1) @ w[p + "wo.weight"].T
        h = rms_norm(x, w[p + "ffn_norm.weight"])
        gate, up = (h @ w[p + "ffn.w12.weight"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "ffn.w3.weight"].T
        states.append(x)
        attentions.append(probs)
    return states, attentions, rms_norm(x, w["model.layer_norm.weight"])


def random_weights():
    """Return the weights of the masked language model, and those of the classifier's head."""

    def normal(*shape, std=0.3):
        return torch.randn(*shape) * std

    wide, narrow = 1 / math.sqrt(HIDDEN), 1 / math.sqrt(FFN)
    weights = {
        "model.encoder.weight": normal(VOCAB, HIDDEN, std=1.0),
        "model.layer_norm.weight": 1 + normal(HIDDEN, std=0.1),
        "decoder.weight": normal(VOCAB, HIDDEN),
        "decoder.bias": normal(VOCAB),
    }
    for i in range(LAYERS):
        p = f"model.transformer_encoder.{i}."
        weights |= {
            p + "qkv.weight": normal(3 * HIDDEN, HIDDEN, std=2 * wide),
            p + "wo.weight": normal(HIDDEN, HIDDEN, std=wide),
            p + "ffn.w12.weight": normal(2 * FFN, HIDDEN, std=wide),
            p + "ffn.w3.weight": normal(HIDDEN, FFN, std=narrow),
            p + "attention_norm.weight": 1 + normal(HIDDEN, std=0.1),
            p + "ffn_norm.weight": 1 + normal(HIDDEN, std=0.1),
        }
    head = {
        "dense.weight": normal(HIDDEN, HIDDEN, std=wide),
        "dense.bias": normal(HIDDEN),
        "classifier.weight": normal(LABELS, HIDDEN, std=wide),
        "classifier.bias": normal(LABELS),
    }
    return weights, head


def expected_outputs(w):
    """Return inputs and outputs: no padding, right padding, left padding, three tokens, and the same tokens in one packed row."""
    ids = torch.randint(5, VOCAB, (4, LENGTH))
    keep = torch.ones(4, LENGTH, dtype=torch.bool)
    keep[1, LENGTH // 2 :] = False
    keep[2, : LENGTH // 3] = False
    keep[3, 3:] = False
    ids[~keep] = 0
    states, attentions, last = zip(*(encode(w, *row, torch.arange(LENGTH)) for row in zip(ids, keep)))
    hidden = torch.stack(last)
    first = keep.int().argmax(-1)  # the first real token: index 0 unless the row is padded on the left
    cls = torch.tanh(hidden[torch.arange(4), first] @ w["dense.weight"].T + w["dense.bias"])
    expected = {
        "input_ids": ids,
        "attention_mask": keep.long(),
        "last_hidden_state": hidden,
        "mlm_logits": hidden @ w["decoder.weight"].T + w["decoder.bias"],
        "classifier_logits": cls @ w["classifier.weight"].T + w["classifier.bias"],
    }
    expected |= {f"residual_stream.{i}": torch.stack(layer) for i, layer in enumerate(zip(*states))}
    expected |= {f"attentions.{i}": torch.stack(layer) for i, layer in enumerate(zip(*attentions))}
    documents = [row[mask] for row, mask in zip(ids, keep)]
    lengths = torch.tensor(list(map(len, documents)))
    packed = [
        encode(w, each, torch.ones_like(each, dtype=torch.bool), torch.arange(len(each)))[2] for each in documents
    ]
    return expected | {
        "packed.input_ids": torch.cat(documents)[None],
        "packed.cu_seq_lens": torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int(),
        "packed.position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "packed.last_hidden_state": torch.cat(packed)[None],
    }


def write_checkpoint(folder, weights, architecture, **more):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG | {"architectures": [architecture]} | more
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def main(out):
    torch.manual_seed(0)
    weights, head = random_weights()
    expected = expected_outputs({name: tensor.double() for name, tensor in (weights | head).items()})
    names = [f"LABEL_{i}" for i in range(LABELS)]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    encoder = {name: tensor for name, tensor in weights.items() if not name.startswith("decoder")}
    write_checkpoint(out / "masked_lm", weights, "NeoBERTLMHead")
    write_checkpoint(out / "classifier", encoder | head, "NeoBERTForSequenceClassification", **labels)
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, out / "expected.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
