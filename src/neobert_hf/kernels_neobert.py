"""Fast paths for a CPU that records no gradient, each beside the plain twin that runs everywhere else.

`runs_fast` decides; every public function below asks it and nothing else. What makes a path fast:
- temporaries are few and small (a chunk that stays in the cache), because new memory costs more here than arithmetic;
- arithmetic runs in place, but only on tensors that the function made itself: no input and no output of a module, so
  whoever holds one, a hook for instance, never sees it change;
- attention works on blocks of scores, in base 2, and divides by the sum of the weights at the end;
- fp32 products go through oneDNN, which torch carries, where it beats the library that `F.linear` calls.

Axes: `T` tokens, `D` width, `H` heads, `K` head width, `F` feed-forward, `N` sequences of one length `L`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from .machine_neobert import TORCH, onednn_is_best

logger = logging.get_logger(__name__)

CHUNK_TOKENS = 256  # tokens whose fp32 copy stays in the cache between two passes
BLOCK_ROWS = 256  # queries in a block of scores: fewer, and keys are repacked too often for a product
BLOCK_SCORES = 1 << 20  # scores in a block for each thread: 2 MB in bf16
# Below these lengths the products of one head are too small, and SDPA is faster.
SHORTEST_BLOCKED = {torch.bfloat16: 64, torch.float32: 384}


def is_tracing(tensor: torch.Tensor) -> bool:
    """True where the values of a tensor must not decide anything: compile, export, tracing, graph capture, meta device."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or tensor.is_meta
        or (TORCH.FakeTensor is not None and isinstance(tensor, TORCH.FakeTensor))
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def runs_fast(x: torch.Tensor, module: nn.Module) -> bool:
    """Whether the fast paths of this file run on `x` in `module`: evaluating, on a CPU, autograd off, nothing tracing.

    A subclass of Tensor, and a tensor under a transform of torch.func, keep the plain path, which they can follow.
    """
    return (
        not module.training
        and not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not is_tracing(x)
        and not (TORCH.are_functorch_transforms_active is not None and TORCH.are_functorch_transforms_active())
    )


# ----------------------------------------------------------------------------------------------------------------------
# Products
# ----------------------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """nn.Linear whose products take the fastest library, and the packed copy of the weight if there is one."""

    _packed = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out)."""
        dtype = self.weight.dtype
        if x.dtype == dtype and runs_fast(x, self) and x.numel() and not torch.is_autocast_enabled("cpu"):
            packed = self._packed and self._current_pack()
            if packed is not None:
                return _onednn_linear(x, packed.weight, self.bias)
            if (
                dtype == torch.float32
                and runs_fast(self.weight, self)
                and onednn_is_best(dtype, x.numel() // x.shape[-1])
            ):
                return _onednn_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Keep a copy of the weight in the order in which oneDNN's products read it."""
        weight = self.weight.detach()
        watched = weight.flatten()[:: max(weight.numel() // 64, 1)]
        packed = TORCH.onednn_reorder(weight)
        self._packed = PackedWeight(packed, weight.data_ptr(), _version(weight), watched, watched.clone())

    def _current_pack(self):
        packed, weight = self._packed, self.weight
        if (
            weight.data_ptr() == packed.address
            and _version(weight) == packed.version
            and torch.equal(packed.watched, packed.sample)
        ):
            return packed
        logger.warning_once(
            "Weights have changed after pack_weights(); their packed copies are dropped. Call it again."
        )
        self._packed = None

    def __getstate__(self):
        return {**self.__dict__, "_packed": None}  # neither copied nor pickled


class PackedWeight(NamedTuple):
    """A packed copy, and what tells that the weight which it was made from has changed.

    Attributes:
        weight: (out, in), opaque.
        address: Where the weight's memory begins.
        version: The weight's count of changes; a change through `.data` does not count, hence the sample.
        watched: Up to 64 places spread over the weight, a view of it.
        sample: The values that these places had.
    """

    weight: torch.Tensor
    address: int
    version: int
    watched: torch.Tensor
    sample: torch.Tensor


def _version(weight):
    return 0 if weight.is_inference() else weight._version


def pack_weights(model: nn.Module) -> None:
    """Give each product of `model` a second copy of its weight, in the order in which a CPU reads it fastest.

    It costs the memory of those weights once more and pays for small inputs most. A packed copy whose weight changes is
    dropped, with a warning. Nothing of it is saved, and training does not use it.

    Raises:
        ValueError: The weights are not on a CPU, or not in a dtype whose products go through oneDNN.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for kind in {(layer.weight.device.type, layer.weight.dtype) for layer in layers}:
        if kind[0] != "cpu" or not onednn_is_best(kind[1]):
            raise ValueError(
                f"weights on {kind[0]} in {kind[1]} cannot be packed here: this is for a CPU and for float32 or bfloat16 "
                "where oneDNN has the fastest products; leave pack_weights() out"
            )
    for layer in layers:
        layer.pack()


def _onednn_linear(x, weight, bias=None):
    # The operator that torch's own compiler emits. It is not public, hence the checks in `onednn_is_best`.
    return TORCH.onednn_linear(x, weight, bias, "none", [], "")


# ----------------------------------------------------------------------------------------------------------------------
# Norm, SwiGLU and rotary positions
# ----------------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """RMSNorm that returns the dtype of its weight, so that an fp32 residual stream can feed fp16 products."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight; the fast path rounds once, at the end."""
        if not runs_fast(x_TD, self):
            weight = self.weight.to(x_TD.dtype)
            return F.rms_norm(x_TD, self.normalized_shape, weight, self.eps).to(self.weight.dtype)
        out_TD = x_TD.to(torch.float32, copy=True)
        length = torch.linalg.vector_norm(out_TD, dim=-1, keepdim=True)
        scale = torch.addcmul(torch.tensor(self.eps), length, length, value=1 / x_TD.shape[-1]).rsqrt_()
        return out_TD.mul_(scale).mul_(self.weight).to(self.weight.dtype)


def swiglu(gate_up_T2F: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """silu(gate) * up for gate and up side by side: (T, 2 F) to (T, F)."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    if not runs_fast(gate_up_T2F, module):
        return F.silu(gate_TF) * up_TF
    return F.silu(gate_TF).mul_(up_TF)


def split_and_rotate(
    qkv_TH3K: torch.Tensor, rotary: torch.Tensor, module: nn.Module
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take queries, keys and values apart and rotate the former two by the token's angles, in the table's dtype.

    Rotary positions turn consecutive pairs (2i, 2i + 1) of each head.

    Args:
        qkv_TH3K: (T, H, 3, K), query, key and value of each head side by side.
        rotary: (T, K / 2, 2), cosine and sine of each pair's angle.
        module: Whose tensor it is, for `runs_fast`.

    Returns:
        Queries, keys and values, (T, H, K); the fast path lays them out head by head in memory, as attention wants them.
    """
    if not runs_fast(qkv_TH3K, module):
        qk_TH2K, cos, sin = qkv_TH3K[:, :, :2], *rotary[:, None, None].unbind(-1)
        even, odd = qk_TH2K.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return *turned.to(qkv_TH3K.dtype).unbind(2), qkv_TH3K[:, :, 2]
    num_tokens, num_heads, _, width = qkv_TH3K.shape
    turns, qkv_3HTK = torch.view_as_complex(rotary), qkv_TH3K.new_empty(3, num_heads, num_tokens, width)
    for start in range(0, num_tokens, CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        out = qkv_3HTK[:, :, chunk]
        qk = out.copy_(qkv_TH3K[chunk].permute(2, 1, 0, 3))[:2]
        wide = qk.to(torch.float32, copy=True)
        torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(turns[chunk])
        qk.copy_(wide)
    return qkv_3HTK.transpose(1, 2).unbind(0)


# ----------------------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------------------


def blocked_attention(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    """Attention within each sequence, in both directions, block by block: softmax(q k^T / sqrt(K)) v.

    Its plain twin is `scaled_dot_product_attention`. A softmax may be taken in any base and its sum be divided out last:
    2^s costs less than e^s, and the division touches K numbers in a row instead of L. What a softmax usually subtracts,
    the largest score, is subtracted only where the sum without it leaves the range that keeps full precision.

    Args:
        q_THK: (T, H, K) queries, bf16 or fp32.
        k_THK: (T, H, K) keys.
        v_THK: (T, H, K) values.
        lengths: Number of tokens of each sequence, T in all.

    Returns:
        (T, H, K), contiguous.
    """
    out_THK = torch.empty(q_THK.shape, dtype=q_THK.dtype)
    tensors_HTK = *(x.transpose(0, 1).contiguous() for x in (q_THK, k_THK, v_THK)), out_THK.transpose(0, 1)
    if len(set(lengths)) == 1:  # a batch
        _attend_batch(*(x.unflatten(1, (-1, lengths[0])) for x in tensors_HTK))
    else:
        for sequence in zip(*(x.split(lengths, dim=1) for x in tensors_HTK)):
            _attend_batch(*(x[:, None] for x in sequence))
    return out_THK


def _attend_batch(q_HNLK, k_HNLK, v_HNLK, out_HNLK):
    """Fill `out_HNLK` with the attention of N sequences of length L."""
    num_heads, num_sequences, length, width = q_HNLK.shape
    is_fp32 = q_HNLK.dtype == torch.float32
    if length < SHORTEST_BLOCKED[q_HNLK.dtype]:
        out_HNLK.copy_(F.scaled_dot_product_attention(q_HNLK, k_HNLK, v_HNLK))
        return
    rows = min(length, BLOCK_ROWS)
    num_threads = torch.get_num_threads()
    num_matrices = 1 if is_fp32 else max(num_threads * BLOCK_SCORES // (rows * length), num_threads)
    sequences = min(num_sequences, num_matrices)
    heads = min(num_heads, max(num_matrices // sequences, 1))
    scale = math.log2(math.e) / math.sqrt(width)
    products = _products_fp32 if is_fp32 else _products_bf16
    for n in range(0, num_sequences, sequences):
        for h in range(0, num_heads, heads):
            q, k, v, out = (x[h : h + heads, n : n + sequences] for x in (q_HNLK, k_HNLK, v_HNLK, out_HNLK))
            score, mix = products(k.flatten(0, 1), v.flatten(0, 1), scale)
            for r in range(0, length, rows):
                weights, total = _weights(score, q[:, :, r : r + rows].flatten(0, 1))
                torch.div(*(x.unflatten(0, q.shape[:2]) for x in (mix(weights), total)), out=out[:, :, r : r + rows])


def _products_bf16(k_BLK, v_BLK, scale):
    """Functions from queries (B, M, K) to scores (B, M, L), and from weights to weighted values."""
    nothing = k_BLK.new_empty(())
    # The product is scaled in fp32, before it is rounded to bf16.
    return lambda q: torch.baddbmm(nothing, q, k_BLK.mT, beta=0, alpha=scale), lambda weights: torch.bmm(weights, v_BLK)


def _products_fp32(k_1LK, v_1LK, scale):
    k_LK, v_KL = k_1LK[0] * scale, v_1LK[0].T.contiguous()
    return lambda q: _onednn_linear(q[0], k_LK)[None], lambda weights: _onednn_linear(weights[0], v_KL)[None]


def _weights(score, q_BMK):
    """2^score (B, M, L), and the sums over keys (B, M, 1)."""
    weights = score(q_BMK).exp2_()
    total = weights.sum(-1, keepdim=True)
    smallest, largest = total.aminmax()
    if not (smallest.item() > 2.0**-100 and largest.item() < 2.0**100):
        # Only in the matrices that need it: the numbers of one sequence do not depend on those beside it.
        needs_shift = ~((total > 2.0**-100) & (total < 2.0**100)).flatten(1).all(1)
        shifted = score(q_BMK)[needs_shift]
        weights[needs_shift] = shifted.sub_(shifted.amax(-1, keepdim=True)).exp2_()
        total = weights.sum(-1, keepdim=True)
    return weights, total
