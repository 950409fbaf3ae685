"""Fast inference on a GPU (`inference_copy`): blocks as two compiled regions around attention, and CUDA graphs for short inputs.

Attention stays outside of the regions, so a region reads tensors only: one graph of the compiler serves all blocks and lengths.

Axes: `T` tokens, `D` width, `H` heads, `K` head width.
"""

import threading
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from .backends_neobert import find_backend
from .kernels_neobert import InferenceLinear, is_hooked, is_inference
from .layout_neobert import to_device
from .machine_neobert import is_autocast_on, is_capturing, is_tracing
from .plan_neobert import ForwardPlan
from .rotary_neobert import split_and_rotate

logger = logging.get_logger(__name__)

SHORTEST_CAPTURED, LONGEST_CAPTURED = 64, 4160  # tokens; the arithmetic of more takes longer than the launches of its kernels
MOST_GRAPHS = 128  # each keeps a few MB on the GPU; further sizes run without a graph


def _normalize(x_TD, norm):
    # a float in arithmetic becomes an input of the graph; as an argument of F.rms_norm it would be compiled twice
    wide_TD = x_TD.float()
    scale = (wide_TD.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return (wide_TD * scale * norm.weight.float()).to(norm.weight.dtype)


def project(block: nn.Module, x_TD: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values (T, H, K), as `NeoBERTBlock.forward` computes them before attention."""
    qkv_TD = F.linear(_normalize(x_TD, block.attention_norm), block.qkv.weight)
    return split_and_rotate(qkv_TD.unflatten(-1, (-1, 3, block.head_dim)), table)


def finish(block: nn.Module, x_TD: torch.Tensor, out_THK: torch.Tensor) -> torch.Tensor:
    """The residual stream (T, D) after a block, as `NeoBERTBlock.forward` computes it after attention."""
    x_TD = x_TD + F.linear(out_THK.flatten(1), block.wo.weight)
    gate_TF, up_TF = F.linear(_normalize(x_TD, block.ffn_norm), block.ffn.w12.weight).chunk(2, dim=-1)
    return x_TD + F.linear(F.silu(gate_TF) * up_TF, block.ffn.w3.weight)


def runs_compiled(weight: torch.Tensor, encoder: nn.Module) -> bool:
    """Whether the blocks of an inference copy run as compiled regions: it only infers, without autocast."""
    can_compile = is_capturing(weight) or not is_tracing(weight)
    return can_compile and is_inference(weight, encoder) and not is_autocast_on(weight.device)


def runs_in_regions(block: nn.Module) -> bool:
    """Whether all linear layers of a block are those of an inference copy, and none has a hook."""
    layers = block.qkv, block.wo, block.ffn.w12, block.ffn.w3
    return all(type(layer) is InferenceLinear and layer.bias is None for layer in layers) and not is_hooked(*layers)


@lru_cache
def compiled_regions():
    """`project` and `finish`, compiled at their first call."""
    return torch.compile(project, dynamic=True), torch.compile(finish, dynamic=True)


class GraphSize(NamedTuple):
    """Numbers of tokens and documents of a CUDA graph, and the length of its longest document."""

    num_tokens: int
    num_documents: int
    longest: int

    @classmethod
    def for_lengths(cls, lengths: tuple[int, ...]) -> tuple["GraphSize", list[int]]:
        """The size for documents of these lengths, and the lengths of the documents that fill it; each has a token or more."""
        num_documents = 1 << len(lengths).bit_length()
        num_fillers = num_documents - len(lengths)
        rest = max(sum(lengths) + num_fillers - SHORTEST_CAPTURED, 0)
        step = max(SHORTEST_CAPTURED, 1 << max(rest.bit_length() - 3, 0))  # at most a quarter of the tokens is padding
        num_tokens = SHORTEST_CAPTURED - (-rest // step) * step
        last = num_tokens - sum(lengths) - num_fillers + 1
        longest = SHORTEST_CAPTURED
        while longest < max(last, *lengths):
            longest *= 4
        return cls(num_tokens, num_documents, longest), [1] * (num_fillers - 1) + [last]


class _Graph(NamedTuple):
    """A captured forward and its tensors, which are at fixed addresses: ids (1, T), boundaries (N + 1,), states (T, D)."""

    graph: "torch.cuda.CUDAGraph"
    inputs: dict[str, torch.Tensor]
    states_TD: torch.Tensor


class GraphCache:
    """The CUDA graphs of one encoder. A graph reads the weights where they are, so it sees changes in place."""

    def __init__(self, encoder: nn.Module):
        self.modules = tuple(encoder.modules())
        self.graphs: dict[GraphSize, _Graph] = {}
        self.is_on, self.lock, self.pool, self.done = True, threading.Lock(), None, None

    def encode(self, encoder: nn.Module, tokens: torch.Tensor, plan: ForwardPlan) -> torch.Tensor | None:
        """The states (T, D) after the last norm, or None if no graph can compute them.

        The values of the inputs were checked, and the result is a copy, so another thread may use the graph afterwards.

        Args:
            tokens: (B, L) ids.
            plan: Plan of the forward, with the lengths of the documents on the host.
        """
        layout = plan.layout
        if not (self.is_on and layout.lengths and find_backend(plan.backend).reads_boundaries and tokens.ndim == 2):
            return None
        size, fillers = GraphSize.for_lengths(layout.lengths)
        modules = tuple(encoder.modules())
        if size.num_tokens > LONGEST_CAPTURED or modules != self.modules or is_hooked(*modules):
            return None
        bounds = torch.tensor([0, *layout.lengths, *fillers], device="cpu").cumsum(0).int()
        values = layout.flatten(tokens), layout.position_ids, to_device(bounds, tokens.device)
        with self.lock, torch.cuda.device(tokens.device):
            stream = torch.cuda.current_stream()
            if self.done is not None:
                stream.wait_event(self.done)  # a graph may still run on the stream of another thread
            captured = self.graphs.get(size) or self._capture(encoder, size, bounds, tokens.device)
            if captured is None:
                return None
            for target, value in zip(captured.inputs.values(), values):
                target.view(-1)[: len(value)].copy_(value)
            captured.graph.replay()
            states_TD = captured.states_TD[: len(layout.position_ids)].clone()
            self.done = stream.record_event()
        return states_TD

    @torch.inference_mode(False)  # a tensor that is made in inference mode could not be changed outside of it
    @torch.no_grad()
    def _capture(self, encoder, size, bounds, device):
        """Capture a forward of this size; None if that fails or there are too many graphs."""
        if len(self.graphs) == MOST_GRAPHS:
            return None
        row = torch.zeros(1, size.num_tokens, dtype=torch.long, device=device)
        inputs = dict(input_ids=row, position_ids=row.clone(), cu_seq_lens_q=to_device(bounds, device))
        options = dict(max_length_q=size.longest, trust_boundaries=True, return_packed=True, return_dict=True)
        graph, self.pool = torch.cuda.CUDAGraph(), self.pool or torch.cuda.graph_pool_handle()
        try:
            encoder(**inputs, **options)  # compiles, and chooses the configurations of the kernels
            # other threads may allocate memory meanwhile
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                states_TD = encoder(**inputs, **options).last_hidden_state
        except RuntimeError as error:
            self.is_on = False
            logger.warning_once(
                f"No CUDA graph for {size.num_tokens} tokens, so this inference copy launches each kernel, and short inputs take "
                f"longer: {error}; free memory on the GPU and make a new copy"
            )
            return None
        self.graphs[size] = _Graph(graph, inputs, states_TD)
        return self.graphs[size]
