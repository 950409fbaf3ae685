"""CPU inference kernels, each next to its reference implementation.

`runs_fast` decides once per forward whether they run. They are fast for these reasons:
- Few operations: for a sentence of 16 tokens, the overhead of small operations takes as long as the arithmetic.
- Matrix products run in oneDNN, which is part of torch, if it is faster than the library behind `F.linear`.
- Few temporary tensors, small enough for the cache. Arithmetic is in place, but only on tensors that the function itself made:
  inputs and outputs of modules never change, so a hook may keep them.
- Attention in bf16 works on blocks of scores, in base 2, and divides by the sum of the weights at the end. With AMX it is SDPA,
  on tensors in bf16 that are stored head by head.

Axes: `T` tokens, `D` width, `H` heads, `K` head width, `F` feed-forward, `N` sequences of one length `L`.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .machine_neobert import TORCH, has_amx, is_capturing, is_tracing, onednn_is_best, product_dtype

BLOCK_ROWS = 256  # queries in a block of scores; with fewer queries, products repack the keys too often
BLOCK_SCORES = 1 << 20  # scores in a block for each thread: 2 MB in bf16
EXACT_ROWS = 64  # a product of so few rows costs less than the copy to another number of rows
SHORTEST_TILED = 64  # tokens; the products of one head are too small in a shorter sequence, and SDPA is faster
COPY_REMEDY = "use the model that this inference copy was made from, and make a new copy afterwards"


# making a scalar tensor takes as long as the arithmetic with it
_scalar = lru_cache(partial(torch.tensor, dtype=torch.float32, device="cpu"))


def runs_fast(x: Tensor, module: nn.Module) -> bool:
    """Whether the kernels of this file can run on `x` in `module`: inference on a CPU, and no tracing."""
    is_possible = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    return is_possible and not is_tracing(x) and is_inference(x, module)


def is_inference(x: Tensor, module: nn.Module) -> bool:
    """Whether `module` only infers: evaluation mode, no autograd, and nothing that intercepts the reference implementations.

    Subclasses of Tensor, transforms of torch.func and modes, such as FlopCounterMode, do so.
    """
    if module.training or torch.is_grad_enabled():
        return False
    return type(x) in (Tensor, nn.Parameter) and not _is_intercepted()


def _is_intercepted() -> bool:
    """Whether a transform of torch.func or a mode sees every operation; True if this torch cannot tell."""
    checks = TORCH.are_functorch_transforms_active, TORCH.num_dispatch_modes, TORCH.function_modes
    if None in checks or TORCH.are_functorch_transforms_active() or TORCH.num_dispatch_modes():
        return True
    return any(type(mode) is not TORCH.DeviceContext for mode in TORCH.function_modes())  # of torch.set_default_device


def is_hooked(*modules: nn.Module) -> bool:
    """Whether one of the modules has a hook, its own or for all modules, or a replaced `forward`, so that it must be called."""
    return TORCH.has_global_hooks is None or TORCH.has_global_hooks() or any(map(has_own_hooks, modules))


def has_own_hooks(module: nn.Module) -> bool:
    """Whether the module has a hook of its own or a replaced `forward`."""
    # torch has no public names for the hooks of a module
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def choose_product(dtype: torch.dtype, num_rows: int) -> Callable[..., Tensor]:
    """The fastest function of (x, weight, bias) for a product of `num_rows` rows on this CPU."""
    return multiply_by_onednn if onednn_is_best(dtype, num_rows) else F.linear


def linear(
    layer: nn.Module,
    x: Tensor,
    multiply: Callable[..., Tensor] | None,
) -> Tensor:
    """layer(x), by the library that was chosen.

    Args:
        layer: nn.Linear, or a module in its place (an adapter, a quantized layer), which is then called.
        x: (T, in); the result is (T, out).
        multiply: Result of `choose_product`, or None to call the layer.
    """
    if multiply is None or is_hooked(layer) or torch.is_autocast_enabled("cpu") or not len(x):
        return layer(x)
    if isinstance(layer, InferenceLinear) and x.dtype == layer.dtype:
        return layer.multiply(x)
    if is_plain(layer) and x.dtype == layer.weight.dtype:
        return multiply(x, layer.weight, layer.bias)
    return layer(x)


def is_plain(layer: nn.Module) -> bool:
    """Whether it is a linear layer of torch, without adapters or quantized weights."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def in_few_shapes(
    multiply: Callable[[Tensor], Tensor],
    x: Tensor,
) -> Tensor:
    """multiply(x), computed for one of few numbers of rows: some rows of x are computed twice.

    oneDNN compiles a program of about 0.5 MB for each number of rows and each shape of a layer, and torch keeps 1,024 of them.
    In a service whose batches all differ, these programs and the memory that they fragment would grow to 900 MB.

    Args:
        multiply: Function from (R, in) to (R, out), row by row.
        x: (T, in). Above `EXACT_ROWS`, R has 16 values between two powers of two, at most T + T / 16.
    """
    num_rows = len(x)
    step = 1
    if num_rows > EXACT_ROWS:
        step = 1 << (num_rows - 1).bit_length() - 5
    num_more = -num_rows % step
    if not num_more:
        return multiply(x)
    return multiply(torch.cat((x, x[:num_more])))[:num_rows]


def multiply_by_onednn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """x (T, in) times the transpose of `weight` (out, in), plus the bias; the weight may be in oneDNN's order."""
    return in_few_shapes(lambda rows: TORCH.onednn_linear(rows, weight, bias, "none", [], ""), x)


def check_conversion(
    fn: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ValueError if `fn`, which nn.Module applies to all tensors, converts or moves those of an inference copy."""
    changed = fn(torch.empty(0, dtype=dtype, device=device))
    if (changed.dtype, changed.device) != (dtype, device):
        raise ValueError(f"an inference copy cannot be converted to {changed.dtype} on {changed.device}; {COPY_REMEDY}")


class InferenceLinear(nn.Module):
    """A linear layer for inference on this device: its matrix is no parameter, and in the order of oneDNN if that is faster."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.dtype = dtype
        self.store(layer.weight.detach().to(dtype))
        bias = layer.bias
        if bias is not None:
            bias = bias.detach().to(dtype, copy=True)
        self.register_buffer("bias", bias)

    def store(self, weight: Tensor) -> None:
        """Keep a matrix (out, in)."""
        is_on_cpu = weight.device.type == "cpu"
        if is_on_cpu and TORCH.onednn_reorder is not None and onednn_is_best(weight.dtype, num_rows=1):
            weight = TORCH.onednn_reorder(weight)
        else:
            weight = weight.clone()
        self.register_buffer("weight", weight)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out), in the dtype of nn.Linear; the backward pass raises an error."""
        if is_tracing(x) and not is_capturing(x):
            raise ValueError(f"an inference copy cannot be traced or exported; {COPY_REMEDY}")
        rows = x.flatten(0, -2).to(self.dtype)
        out = _WithoutGradient.apply(rows, self) if len(rows) else rows.new_empty(0, self.out_features)
        return out.unflatten(0, x.shape[:-1]).to(product_dtype(rows))

    def multiply(self, x: Tensor) -> Tensor:
        """(T, in) to (T, out)."""
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight, self.bias)
        if _is_intercepted():  # FlopCounterMode, for example, does not know the operations of oneDNN
            return F.linear(x, self.weight.to_dense(), self.bias)
        return multiply_by_onednn(x, self.weight, self.bias)

    def _apply(self, fn, *args, **kwargs):
        """As in nn.Module, which calls it to convert and to move all tensors; refuses both."""
        check_conversion(fn, self.dtype, self.weight.device)
        return self

    def extra_repr(self) -> str:
        """Shape and dtype, and where adapters belong, which PEFT's error then shows."""
        return f"{self.in_features}, {self.out_features}, {self.dtype}; to train or adapt, {COPY_REMEDY}"

    def __reduce_ex__(self, protocol):
        raise ValueError(
            f"an inference copy cannot be copied or pickled, because its matrices belong to this device; {COPY_REMEDY}"
        )


class Int8Linear(InferenceLinear):
    """A linear layer without bias whose product is int8, with a scale for each row of the input and for each output.

    A row of the result does not depend on other rows. Weights have 7 bits: a CPU without VNNI adds two products of an 8-bit and
    a 7-bit number in 16 bits, and those of two 8-bit numbers would saturate.
    """

    def store(self, weight: Tensor) -> None:
        """Keep a float32 matrix (out, in) as integers in -63 to 63."""
        largest = weight.abs().amax(1)
        scale = largest.clamp(min=torch.finfo(torch.float32).tiny) / 63
        rounded = (weight / scale[:, None]).round()
        self.register_buffer("weight", TORCH.onednn_int8_prepack(rounded.to(torch.int8), None))
        # A row x is stored as the uint8 numbers 127 * x / largest + 128; the offset takes back what 128 adds to the product.
        self.register_buffer("scale", scale / 127)
        self.register_buffer("offset", -128 * rounded.sum(1) * self.scale)
        self.register_buffer("zero_points", torch.zeros(len(scale), dtype=torch.int64))

    def multiply(self, x: Tensor) -> Tensor:
        """As `InferenceLinear.multiply`."""
        return in_few_shapes(self._multiply, x)

    def _multiply(self, x):
        largest = x.abs().amax(-1, keepdim=True)
        # + 0.5, because the conversion to an integer rounds down. From float32 to uint8 directly, it is several times slower.
        rows = torch.add(_scalar(128.5), x / largest, alpha=127)
        rows = rows.to(torch.int32).to(torch.uint8)
        weight = self.weight, self.scale, self.zero_points
        options = 1.0, 0, torch.float32, "none", [], ""
        out = TORCH.onednn_int8_linear(rows, 1.0, 0, *weight, self.offset, *options)
        return out.mul_(largest)


class _WithoutGradient(torch.autograd.Function):
    """`multiply` of a layer; its backward pass raises an error."""

    @staticmethod
    def forward(ctx, x, layer):
        return layer.multiply(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        raise ValueError(f"an inference copy has no gradients; to train, {COPY_REMEDY}")


def rms_norm(x_TD: Tensor, norm: nn.RMSNorm) -> Tensor:
    """norm(x) in fp32, rounded once, at the end."""
    wide_TD = x_TD.float()
    length = torch.linalg.vector_norm(wide_TD, dim=-1, keepdim=True)
    mean_square = torch.addcmul(_scalar(norm.eps), length, length, value=1 / x_TD.shape[-1])
    scale = mean_square.rsqrt_()
    out_TD = wide_TD * scale if wide_TD is x_TD else wide_TD.mul_(scale)
    return out_TD.mul_(norm.weight.float()).to(norm.weight.dtype)


def tiled_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    lengths: tuple[int, ...],
) -> Tensor:
    """Attention within each sequence, in both directions, block by block: softmax(q k^T / sqrt(K)) v.

    The reference implementation is `scaled_dot_product_attention`. This kernel scales the scores by log2(e) and computes 2^s,
    which costs less than e^s. It divides by the sum of the weights at the end: K divisions per row instead of L. It subtracts
    the largest score only if the sum would otherwise leave the range of full precision.

    Args:
        q_THK: (T, H, K) queries, bf16, as are keys and values.
        lengths: Number of tokens of each sequence, T in all.

    Returns:
        (T, H, K), contiguous.
    """
    out_THK = torch.empty(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
    inputs_HTK = [x.transpose(0, 1).contiguous() for x in (q_THK, k_THK, v_THK)]
    tensors_HTK = [*inputs_HTK, out_THK.transpose(0, 1)]
    if len(set(lengths)) == 1:  # sequences of equal length form a batch
        _attend_batch(*(x.unflatten(1, (-1, lengths[0])) for x in tensors_HTK))
        return out_THK
    for sequence in zip(*(x.split(lengths, dim=1) for x in tensors_HTK)):
        _attend_batch(*(x[:, None] for x in sequence))
    return out_THK


def _attend_batch(q_HNLK, k_HNLK, v_HNLK, out_HNLK):
    """Write the attention of N sequences of length L to `out_HNLK`."""
    num_heads, num_sequences, length, width = q_HNLK.shape
    # with AMX, SDPA was 1.0 to 1.6 times as fast as tiles, at 64 to 4,096 tokens
    if length < SHORTEST_TILED or has_amx():
        out_HNLK.copy_(F.scaled_dot_product_attention(q_HNLK, k_HNLK, v_HNLK))
        return
    rows = min(length, BLOCK_ROWS)
    num_threads = torch.get_num_threads()
    num_matrices = max(num_threads * BLOCK_SCORES // (rows * length), num_threads)
    sequences = min(num_sequences, num_matrices)
    heads = min(num_heads, max(num_matrices // sequences, 1))
    scale = math.log2(math.e) / math.sqrt(width)
    for n in range(0, num_sequences, sequences):
        for h in range(0, num_heads, heads):
            part = slice(h, h + heads), slice(n, n + sequences)
            q, k, v, out = q_HNLK[part], k_HNLK[part], v_HNLK[part], out_HNLK[part]
            _attend_part(q, k, v, out, rows, scale)


def _attend_part(q_HNLK, k_HNLK, v_HNLK, out_HNLK, rows, scale):
    """Write the attention of some heads of some sequences to `out_HNLK`, from blocks of `rows` queries."""
    k_BLK, v_BLK = k_HNLK.flatten(0, 1), v_HNLK.flatten(0, 1)
    for q, out in zip(q_HNLK.split(rows, 2), out_HNLK.split(rows, 2)):
        weights, total = _weights(q.flatten(0, 1), k_BLK, scale)
        mixed = torch.bmm(weights, v_BLK).unflatten(0, q.shape[:2])
        torch.div(mixed, total.unflatten(0, q.shape[:2]), out=out)


def _weights(q_BMK, k_BLK, scale):
    """2^score (B, M, L), and the sums over keys (B, M, 1)."""
    # The product is scaled in fp32 and then rounded to bf16.
    score = partial(torch.baddbmm, k_BLK.new_empty(()), q_BMK, k_BLK.mT, beta=0, alpha=scale)
    weights = score().exp2_()
    total = weights.sum(-1, keepdim=True)
    smallest, largest = total.aminmax()
    if not (smallest.item() > 2.0**-100 and largest.item() < 2.0**100):
        # Only in the matrices that need it, so that a sequence does not depend on other sequences of the batch.
        is_precise = (total > 2.0**-100) & (total < 2.0**100)
        needs_shift = ~is_precise.flatten(1).all(1)
        shifted = score()[needs_shift]
        largest_score = shifted.amax(-1, keepdim=True)
        weights[needs_shift] = shifted.sub_(largest_score).exp2_()
        total = weights.sum(-1, keepdim=True)
    return weights, total
