"""Equal bits: the parts of a batch-invariant copy, which compute a text in one way in any batch (see `inference_copy`).

Sums have one order for every number of rows, columns and threads, and elementwise operations one formula for every element.

Axes: `T` tokens, `D` width, `B` rows, `L` columns, `H` heads, `K` head width.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks_neobert import NeoBERTAttention, NeoBERTBlock
from .kernels_neobert import InferenceLinear

COLUMNS = 64  # PyTorch adds up a row in one order for every multiple of 4 vectors, of 16 numbers at most
UNSPLIT = 32_767  # elements; PyTorch computes so few in one thread
# These have another formula for the elements that do not fill a vector.
ACTIVATIONS = (
    nn.Sigmoid,
    nn.SiLU,
    nn.GELU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.Mish,
    nn.Softplus,
)


def in_one_thread(operate: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """operate(*tensors), elementwise, on groups of rows that PyTorch gives to one thread each: a row is then computed in one way.

    PyTorch divides more elements between threads, at any element. In each part, vectors come first; the elements that remain have
    another formula of exp, and another rounding of complex products.
    """
    num_rows = UNSPLIT // tensors[0][0].numel()
    groups = zip(*(tensor.split(num_rows) for tensor in tensors))
    return torch.cat([operate(*group) for group in groups])


def in_full_vectors(operate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """operate(x), elementwise, with zeros up to a multiple of `COLUMNS` elements, so that every element is in a full vector."""
    padded = F.pad(x.flatten(), (0, -x.numel() % COLUMNS))
    result = in_one_thread(operate, padded.view(-1, COLUMNS))
    return result.view(-1)[: x.numel()].view(x.shape)


class InvariantLinear(InferenceLinear):
    """A linear layer that computes one row as two, because oneDNN has another order of sums for one row."""

    def multiply(self, x: Tensor) -> Tensor:
        """As `InferenceLinear.multiply`."""
        if len(x) > 1:
            return super().multiply(x)
        two_rows = F.pad(x, (0, 0, 0, 1))
        return super().multiply(two_rows)[:1]


class InvariantBlock(NeoBERTBlock):
    """A block that gives a text the same bits in every batch, and refuses a forward in standard operations or with padding."""

    silu = staticmethod(partial(in_one_thread, F.silu))
    rotate = staticmethod(partial(in_one_thread, torch.mul))

    def forward(self, x_TD, rotary, plan, tokens_S=None):
        """As `NeoBERTBlock.forward`."""
        if not plan.is_fast or not plan.layout.is_packed:
            raise ValueError(
                "a batch-invariant copy cannot run with autograd, output_attentions, a 4-D mask, or a mode such as "
                "FlopCounterMode; use torch.inference_mode() and a 2-D mask, or make the copy without batch_invariant=True"
            )
        return super().forward(x_TD, rotary, plan, tokens_S)


def attend_in_small_heads(q: Tensor, k: Tensor, v: Tensor, *_) -> Tensor:
    """SDPA (B, H, L, K) with one more head and 16 more columns, of zeros.

    Heads run in one thread each, but the products of a single head run in all threads of MKL. In heads of width 6, 8 and 10, the
    order of MKL's sums follows the address of the memory of a thread.
    """
    scale = q.shape[-1] ** -0.5
    q, k, v = (F.pad(x, (0, 16, 0, 0, 0, 1)) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return out[:, :-1, :, :-16]


def pad_columns(module: nn.Module, args: tuple) -> tuple:
    """Pre-hook of the first module of a SentenceTransformer: pads (B, L) inputs to a multiple of `COLUMNS`.

    The modules behind it add up the weights of a row, and the order of such a sum follows the number of columns. The order in
    their linear layers follows the number of rows, where there are fewer than 8.
    """
    features, *others = args
    padded = dict(features)
    for name in features.keys() & {"input_ids", "attention_mask", "token_type_ids"}:
        num_columns = features[name].shape[1]
        padded[name] = F.pad(features[name], (0, -num_columns % COLUMNS))
    return padded, *others


def make_invariant(module: nn.Module) -> None:
    """Make a module of a batch-invariant copy compute a row in one way for every number of rows and of threads."""
    if type(module) is NeoBERTBlock:
        module.__class__ = InvariantBlock
    elif hasattr(module, "is_inference_copy"):
        module.config._attn_implementation = "sdpa"
        module.config.unpad_inputs = True
    elif type(module) is NeoBERTAttention:
        if module.config.head_dim < 16 or module.config.num_attention_heads == 1:
            module.attend = attend_in_small_heads
    elif type(module) in ACTIVATIONS:
        module.forward = partial(in_full_vectors, module.forward)
