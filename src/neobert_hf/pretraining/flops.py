"""Floating-point operations of a training step, and how many of them a device can do in its products."""

import time

import torch
from torch import nn
from transformers import PreTrainedModel


def training_flops(model: PreTrainedModel, num_tokens: int, num_masked: int, sum_of_squares: int) -> int:
    """Floating-point operations of forward and backward in matrix products, those that the result needs and no more.

    Args:
        model: A masked language model.
        num_tokens: Real tokens.
        num_masked: Those of them that the decoder predicts.
        sum_of_squares: Sum of the squared lengths of the sequences that tokens attend in.

    Source: Kaplan et al., arXiv 2001.08361, section 2.1, with attention's products counted exactly.
    """
    config, decoder = model.config, model.get_output_embeddings()
    in_blocks = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not decoder)
    attention = 4 * config.hidden_size * config.num_hidden_layers * sum_of_squares
    forward = 2 * in_blocks * num_tokens + 2 * decoder.weight.numel() * num_masked + attention
    return 3 * forward  # the backward pass has two products for each of these


def matrix_flops_per_s(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """The best rate of floating-point operations that square matrix products reach on a device within that time."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    a @ b  # the first one loads libraries
    _wait(device)
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        started = time.perf_counter()
        a @ b
        _wait(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def _wait(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
