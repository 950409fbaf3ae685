"""Floating-point operations of a training step, and the peak rate of a device in matrix products."""

import time
from collections.abc import Iterable
from functools import cache

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.modeling_neobert import NeoBERTForMaskedLM


def training_flops(model: PreTrainedModel, num_tokens: int, num_masked: int, sum_of_squares: int) -> int:
    """Floating-point operations in the matrix products of forward and backward, without padding, masked tiles or recomputation.

    Not by torch.utils.flop_counter.FlopCounterMode, which counts what a backend computes: masked positions too where it masks,
    and nothing for kernels that it does not know.

    Args:
        model: A masked language model.
        num_tokens: Number of real tokens.
        num_masked: Number of tokens that the decoder predicts, and that NeoBERT's last block computes after its attention.
        sum_of_squares: Sum of the squared lengths of the documents, within which tokens attend.

    Source: Kaplan et al., arXiv 2001.08361, section 2.1, with attention's products counted exactly.
    """
    config, decoder = model.config, model.get_output_embeddings()
    at_masked = _num_weights(decoder)
    if isinstance(model, NeoBERTForMaskedLM):
        last = model.model.transformer_encoder[-1]
        at_masked += _num_weights(last.wo) + _num_weights(last.ffn)
    at_all = _num_weights(model) - at_masked
    attention = 4 * config.hidden_size * config.num_hidden_layers * sum_of_squares
    forward = 2 * at_all * num_tokens + 2 * at_masked * num_masked + attention
    return 3 * forward  # the backward pass computes two products for each product of the forward pass


def _num_weights(module):
    """Number of weights in the linear layers of a module."""
    return num_elements(layer.weight for layer in module.modules() if isinstance(layer, nn.Linear))


def num_elements(parameters: Iterable[torch.Tensor]) -> int:
    """Number of elements of whole parameters, also where ZeRO-3 leaves empty tensors in their place."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


@cache
def matrix_flops_per_s(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Best measured rate of square matrix products on a device, in floating-point operations per second.

    Args:
        device: The device to measure.
        dtype: Dtype of the matrices.
        seconds: Time of the measurement; at least one product is measured.
    """
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    a @ b  # the first product loads libraries
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
