"""Fast paths for a CPU that records no gradient, each beside the plain twin that runs everywhere else.

`runs_fast` decides once for each forward. What makes a path fast:
- few operations: one sentence of 16 tokens spends as long in the overhead of small operations as in arithmetic;
- products go through oneDNN, which torch carries, where it beats the library that `F.linear` calls; they add the residual;
- temporaries are few and small (a chunk that stays in the cache), because new memory costs more here than arithmetic;
- arithmetic runs in place, but only on tensors that the function made itself: no input and no output of a module, so
  whoever holds one, a hook for instance, never sees it change;
- attention works on blocks of scores, in base 2, and divides by the sum of the weights at the end.

Two calls change the weights for inference: `prepack_weights` their order in memory, `quantize` their precision.

Axes: `T` tokens, `D` width, `H` heads, `K` head width, `F` feed-forward, `N` sequences of one length `L`.
"""

import math
import warnings
from functools import lru_cache

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
SHORTEST_TILED = {torch.bfloat16: 64, torch.float32: 384}


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
        and TORCH.are_functorch_transforms_active is not None
        and not TORCH.are_functorch_transforms_active()
    )


def is_hooked(*modules: nn.Module) -> bool:
    """Whether somebody watches or replaces the call of one of the modules, so that it has to be called."""
    return any(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__ for module in modules)


# ----------------------------------------------------------------------------------------------------------------------
# Products
# ----------------------------------------------------------------------------------------------------------------------


def choose_kernels(dtype: torch.dtype, num_tokens: int) -> str:
    """Name the fast kernels of a forward by what computes their products, "torch" or "onednn"; "plain" are the slow ones."""
    return "onednn" if onednn_is_best(dtype, num_tokens) else "torch"


def product(layer: nn.Module, x: torch.Tensor, kernels: str, residual: torch.Tensor | None = None) -> torch.Tensor:
    """layer(x), plus the residual if there is one, in one operation where the kernels allow it.

    Args:
        layer: nn.Linear, or whatever took its place (an adapter, a quantized layer), which is then called.
        x: (T, in).
        kernels: What `choose_kernels` named.
        residual: (T, out).

    Returns:
        (T, out).
    """
    is_ordinary = (
        type(layer) in (nn.Linear, PrepackedLinear) and type(layer.weight) is nn.Parameter and not is_hooked(layer)
    )
    if (
        kernels == "plain"
        or not is_ordinary
        or x.dtype != layer.weight.dtype
        or not len(x)
        or torch.is_autocast_enabled("cpu")
    ):
        out = layer(x)
        return out if residual is None else residual + out
    if residual is not None and residual.dtype != x.dtype:  # a wider stream, which float32 embeddings begin
        return residual + product(layer, x, kernels)
    weight, bias = layer.weight, layer.bias
    if kernels == "onednn" or weight.is_mkldnn:
        if residual is None:
            return TORCH.onednn_linear(x, weight, bias, "none", [], "")
        return TORCH.onednn_linear.binary(x, residual, weight, bias, "add")
    if residual is None or bias is not None:
        out = F.linear(x, weight, bias)
        return out if residual is None else residual + out
    return torch.addmm(residual, x, weight.t())


class PrepackedLinear(nn.Linear):
    """An nn.Linear whose weight lies in the order in which oneDNN's products read it; `prepack_weights` makes it.

    There is no second copy that could go stale: `weight` is the packed tensor. State dicts, files and copies hold the weight
    in its usual order. Training, another dtype or device, and loading bring the usual order back.
    """

    def prepack(self) -> None:
        """Put the weight into the packed order."""
        self.weight = nn.Parameter(TORCH.onednn_reorder(self.weight.detach()), self.weight.requires_grad)

    def restore_order(self) -> None:
        """Become the nn.Linear that was packed."""
        self.weight = nn.Parameter(self.weight.detach().to_dense(), self.weight.requires_grad)
        self.__class__ = nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out), by plain operations, through which gradients flow."""
        return F.linear(x, self.weight.to_dense(), self.bias)

    def train(self, mode: bool = True):
        """Unpack for training."""
        if mode:
            self.restore_order()
        return nn.Linear.train(self, mode)

    def _apply(self, fn, recurse=True):
        self.restore_order()
        return nn.Linear._apply(self, fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].to_dense()

    def _load_from_state_dict(self, *arguments):
        self.restore_order()
        nn.Linear._load_from_state_dict(self, *arguments)

    def __reduce_ex__(self, protocol):
        weight = nn.Parameter(self.weight.detach().to_dense(), self.weight.requires_grad)
        return _new_linear, (), {**self.__dict__, "_parameters": {**self._parameters, "weight": weight}}


def _new_linear():
    return nn.Linear.__new__(nn.Linear)


def prepack_weights(model: nn.Module) -> None:
    """Put the weight of each nn.Linear in `model` into the order in which a CPU reads it fastest, where that pays.

    It pays for inputs of up to some hundred tokens most, and costs no memory. The model is then for inference on this CPU:
    training, moving or converting it brings the usual order back. Where it does not pay (no CPU, no oneDNN, a dtype without
    instructions) nothing changes. What was done is logged at level INFO.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    packable = [layer for layer in layers if not layer.training and _prepacking_pays(layer.weight)]
    for layer in packable:
        layer.__class__ = PrepackedLinear
        layer.prepack()
    kept = ""
    if rest := [layer for layer in layers if layer not in packable]:
        weight = rest[0].weight
        kept = f"; {len(rest)} stay as they are, since it does not pay: {weight.dtype} on {weight.device.type}"
        kept += ", training" if rest[0].training else ""
    logger.info(f"prepack_weights: {len(packable)} weights packed{kept}")


def _prepacking_pays(weight):
    is_ordinary = type(weight) is nn.Parameter and weight.device.type == "cpu"
    return is_ordinary and TORCH.onednn_reorder is not None and onednn_is_best(weight.dtype, num_rows=1)


def quantize(model: nn.Module) -> nn.Module:
    """Turn the products of each block of `model` into int8 products for inference on a CPU, in place.

    Weights become int8 with a scale for each output, the inputs of a product int8 with a scale for each call (dynamic
    quantization). Embeddings, norms, attention and heads stay in float32, to which a model in bf16 is converted. It costs
    some accuracy; README.md says how much on the small model. The model cannot be trained or saved afterwards.

    Args:
        model: A NeoBERT, or a model that holds one, such as a SentenceTransformer; on a CPU.

    Returns:
        The same model, in evaluation mode.

    Raises:
        ValueError: The model is not on a CPU, or holds no product of a NeoBERT block.
        ImportError: This torch has no `torch.ao.quantization`.
    """
    try:
        from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
    except ImportError as error:
        raise ImportError(
            f"quantize() needs torch.ao.quantization, which torch {torch.__version__} lacks ({error}); install torch<=2.13, or "
            "quantize with torchao"
        ) from error
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        raise ValueError(f"quantize() is for a CPU, but the model is on {', '.join(sorted(devices))}; use model.cpu()")
    model.float().eval()
    names = {
        name: per_channel_dynamic_qconfig
        for name, module in model.named_modules()
        if "transformer_encoder" in name.split(".") and type(module) is nn.Linear
    }
    if not names:
        raise ValueError(f"{type(model).__name__} holds no product of a NeoBERT block; quantize the model itself, once")
    with (
        warnings.catch_warnings()
    ):  # torch announces that it will remove all of this; the ImportError above is for that day
        warnings.filterwarnings("ignore", message="torch.ao.quantization is deprecated|torch.quantize_per_tensor")
        return quantize_dynamic(model, names, inplace=True)


def check_not_quantized(model: nn.Module) -> None:
    """Raise ValueError if the model has int8 products, which no checkpoint of a NeoBERT can hold."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao."):
            raise ValueError(
                f"{name} is a {type(module).__module__}.{type(module).__name__}; int8 products cannot be saved as a NeoBERT: "
                "save the model that they were made from, and quantize it after loading"
            )


# ----------------------------------------------------------------------------------------------------------------------
# Norm and rotary positions
# ----------------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """RMSNorm that returns the dtype of its weight, so that an fp32 residual stream can feed fp16 products."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight."""
        weight = self.weight.to(x_TD.dtype)
        return F.rms_norm(x_TD, self.normalized_shape, weight, self.eps).to(self.weight.dtype)


def normalize(norm: nn.Module, x_TD: torch.Tensor, kernels: str) -> torch.Tensor:
    """norm(x); by the fast kernels where they are chosen and nobody watches the call."""
    if kernels == "plain" or type(norm) is not RMSNorm or is_hooked(norm):
        return norm(x_TD)
    return rms_norm(x_TD, norm)


_scalar = lru_cache(torch.tensor)  # making a tensor of one number takes as long as the arithmetic on it


def rms_norm(x_TD: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    """norm(x) in fp32, rounded once, at the end."""
    wide_TD = x_TD.float()
    length = torch.linalg.vector_norm(wide_TD, dim=-1, keepdim=True)
    scale = torch.addcmul(_scalar(norm.eps), length, length, value=1 / x_TD.shape[-1]).rsqrt_()
    out_TD = wide_TD * scale if wide_TD is x_TD else wide_TD.mul_(scale)
    return out_TD.mul_(norm.weight.float()).to(norm.weight.dtype)


def split_and_rotate(qkv_TH3K: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take queries, keys and values apart and rotate the former two by the token's angles, in the table's dtype.

    Rotary positions turn consecutive pairs (2i, 2i + 1) of each head.

    Args:
        qkv_TH3K: (T, H, 3, K), query, key and value of each head side by side.
        rotary: (T, K / 2, 2), cosine and sine of each pair's angle.

    Returns:
        Queries, keys and values, (T, H, K).
    """
    qk_TH2K, cos, sin = qkv_TH3K[:, :, :2], *rotary[:, None, None].unbind(-1)
    even, odd = qk_TH2K.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return *turned.to(qkv_TH3K.dtype).unbind(2), qkv_TH3K[:, :, 2]


def split_and_rotate_fast(
    qkv_TH3K: torch.Tensor, turns: torch.Tensor, by_head: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_and_rotate` by complex products.

    Args:
        qkv_TH3K: (T, H, 3, K).
        turns: (T, K / 2) complex64, cosine and sine of each pair's angle.
        by_head: Lay the result out head by head in memory, as blocks of scores want it, in the dtype of `qkv_TH3K`. Else it
            is in float32, in which attention over few tokens is faster and more exact.
    """
    if not by_head:
        q_k_v = qkv_TH3K.float()
        qk_TH2C = torch.view_as_complex(q_k_v[:, :, :2].unflatten(-1, (-1, 2))) * turns[:, None, None]
        return *torch.view_as_real(qk_TH2C).flatten(-2).unbind(2), q_k_v[:, :, 2]
    num_tokens, num_heads, _, width = qkv_TH3K.shape
    qkv_3HTK = qkv_TH3K.new_empty(3, num_heads, num_tokens, width)
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


def tiled_attention(
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
    if length < SHORTEST_TILED[q_HNLK.dtype]:
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
    linear = TORCH.onednn_linear
    options = None, "none", [], ""
    return lambda q: linear(q[0], k_LK, *options)[None], lambda weights: linear(weights[0], v_KL, *options)[None]


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
