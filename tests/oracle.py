"""An independent reference of NeoBERT, written from the paper in NumPy, one document and one head at a time.

It shares no code with the package, not even PyTorch, and is simple rather than fast. `write_checkpoint` writes a tiny
checkpoint in the published layout, including the accidental keys of the published config.json.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "auto_map": {"AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT"},
    "classifier_init_range": 0.02, "decoder_init_range": 0.02, "dim_head": 8, "embedding_init_range": 0.02,
    "hidden_size": 32,
    "intermediate_size": 100,  # two thirds are 66, so that rounding up to 72 is tested
    "kwargs": {"pretrained_model_name_or_path": "google-bert/bert-base-uncased", "trust_remote_code": True},
    "max_length": 64, "model_type": "neobert", "norm_eps": 1e-05, "num_attention_heads": 4, "num_hidden_layers": 3,
    "pad_token_id": 0, "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
    "torch_dtype": "float32", "transformers_version": "4.48.2", "trust_remote_code": True, "vocab_size": 96,
}  # fmt: skip


class Oracle:
    """A NeoBERT in float64 that encodes one document at a time."""

    def __init__(self, weights, config=CONFIG, theta=10000.0):
        self.weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.config, self.theta = config, theta

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x, name):
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config["norm_eps"]) * self.weights[f"{name}.weight"]

    def rotate(self, head, positions):
        """Multiply each pair, read as a complex number, by e^(i * position * theta^(-2j/K))."""
        width = head.shape[-1]
        pairs = head[:, 0::2] + 1j * head[:, 1::2]
        turns = np.exp(1j * np.outer(positions, self.theta ** (-np.arange(0, width, 2) / width)))
        rotated = pairs * turns
        return np.stack((rotated.real, rotated.imag), axis=-1).reshape(len(head), width)

    def encode(self, ids, positions=None):
        """Return embeddings and the state after each block, the probabilities of each block, and the final states."""
        return self.encode_embeddings(self.weights["model.encoder.weight"][ids], positions)

    def encode_embeddings(self, x, positions=None):
        """As `encode`, for (tokens, hidden) embeddings in place of ids."""
        positions = np.arange(len(x)) if positions is None else positions
        heads = self.config["num_attention_heads"]
        width = x.shape[-1] // heads
        states, probabilities = [x], []
        for i in range(self.config["num_hidden_layers"]):
            block = f"model.transformer_encoder.{i}"
            fused = self.linear(self.norm(x, f"{block}.attention_norm"), f"{block}.qkv")
            outputs, block_probabilities = [], []
            for h in range(heads):
                q, k, v = np.split(fused[:, 3 * width * h : 3 * width * (h + 1)], 3, axis=-1)
                scores = self.rotate(q, positions) @ self.rotate(k, positions).T / width**0.5
                p = np.exp(scores - scores.max(axis=-1, keepdims=True))
                p /= p.sum(axis=-1, keepdims=True)
                outputs.append(p @ v)
                block_probabilities.append(p)
            x = x + self.linear(np.concatenate(outputs, axis=-1), f"{block}.wo")
            gate, up = np.split(self.linear(self.norm(x, f"{block}.ffn_norm"), f"{block}.ffn.w12"), 2, axis=-1)
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, f"{block}.ffn.w3")
            states.append(x)
            probabilities.append(np.stack(block_probabilities))
        return states, probabilities, self.norm(x, "model.layer_norm")

    def mlm_logits(self, hidden):
        return self.linear(hidden, "decoder") + self.weights["decoder.bias"]

    def class_logits(self, hidden, pooling="cls"):
        read = {"cls": hidden[0], "mean": hidden.sum(axis=0) / len(hidden)}[pooling]
        pooled = np.tanh(self.linear(read, "dense") + self.weights["dense.bias"])
        return self.linear(pooled, "classifier") + self.weights["classifier.bias"]

    def mlm_loss(self, documents, labels):
        losses = []
        for ids, targets in zip(documents, labels):
            logits = self.mlm_logits(self.encode(ids)[2])
            shifted = logits - logits.max(axis=-1, keepdims=True)
            log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
            losses += [-log_probabilities[i, label] for i, label in enumerate(targets) if label != -100]
        return float(np.mean(losses))


def swiglu_width(config):
    return -(-int(2 * config["intermediate_size"] / 3) // 8) * 8


def random_weights(seed=0, config=CONFIG, num_labels=3):
    """Random weights, large enough to reveal a wrong rotation, row order or norm."""
    rng = np.random.default_rng(seed)
    hidden, width, vocab = config["hidden_size"], swiglu_width(config), config["vocab_size"]
    shapes = {"model.encoder": (vocab, hidden), "decoder": (vocab, hidden)}
    shapes |= {"dense": (hidden, hidden), "classifier": (num_labels, hidden)}
    for i in range(config["num_hidden_layers"]):
        block = f"model.transformer_encoder.{i}"
        shapes |= {f"{block}.qkv": (3 * hidden, hidden), f"{block}.wo": (hidden, hidden)}
        shapes |= {f"{block}.ffn.w12": (2 * width, hidden), f"{block}.ffn.w3": (hidden, width)}
        shapes |= {f"{block}.attention_norm": (hidden,), f"{block}.ffn_norm": (hidden,)}
    shapes["model.layer_norm"] = (hidden,)
    weights = {}
    for name, shape in shapes.items():
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        values = rng.standard_normal(shape) * scale + (len(shape) == 1)
        weights[f"{name}.weight"] = values.astype(np.float32)
    weights["model.encoder.weight"] *= hidden**0.5
    for name in ("decoder", "dense", "classifier"):
        weights[f"{name}.bias"] = rng.standard_normal(shapes[name][0]).astype(np.float32)
    return weights


def split_gate_and_up(weights):
    """The weights in the layout w1w2, as in pszemraj/NeoBERT: gate and up in tensors of their own."""
    split = {}
    for name, value in weights.items():
        if ".ffn.w12." in name:
            split[name.replace("w12", "w1")], split[name.replace("w12", "w2")] = np.split(value, 2)
        else:
            split[name] = value
    return split


def write_checkpoint(folder, weights, architecture="NeoBERTLMHead", config=CONFIG, drop=(), **extra):
    """Write config.json and model.safetensors as published; `drop` are prefixes of tensors to leave out."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    head = {"NeoBERTLMHead": ("dense", "classifier"), "NeoBERTForSequenceClassification": ("decoder",)}[architecture]
    kept = {name: value for name, value in weights.items() if not name.startswith((*head, *drop))}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture], **extra}, indent=2))
    return folder
