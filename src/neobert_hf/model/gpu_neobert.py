"""Inference on a GPU by `inference_copy`: blocks as two compiled regions around attention; on request, CUDA graphs.

Attention is outside of the regions, so they read tensors only, and one graph of the compiler serves all blocks and lengths.

Axes: `T` tokens, `D` width, `H` heads, `K` head width.
"""

import threading
import weakref
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from .backends_neobert import find_backend
from .blocks_neobert import NeoBERTAttention, NeoBERTBlock
from .kernels_neobert import InferenceLinear, is_hooked, is_inference
from .layout_neobert import to_device
from .machine_neobert import is_autocast_on, is_capturing, is_tracing, widen
from .plan_neobert import ForwardPlan
from .rotary_neobert import split_and_rotate

logger = logging.get_logger(__name__)

SHORTEST_CAPTURED = 64  # tokens
LONGEST_CAPTURED = 4160  # the arithmetic of more tokens takes longer than the launches of its kernels
MOST_GRAPHS = 128  # further sizes run without a graph


def runs_compiled(x: Tensor, module: nn.Module) -> bool:
    """Whether a module of an inference copy runs compiled on `x`: it only infers, without autocast."""
    if is_tracing(x) and not is_capturing(x):
        return False
    return is_inference(x, module) and not is_autocast_on(x.device)


def runs_in_regions(block: nn.Module) -> bool:
    """Whether all linear layers of a block are those of an inference copy, and none has a hook."""
    layers = block.qkv, block.wo, block.ffn.w12, block.ffn.w3
    are_ours = all(type(layer) is InferenceLinear and layer.bias is None for layer in layers)
    return are_ours and not is_hooked(*layers)


class CompiledBlock(NeoBERTBlock):
    """A block that runs as two compiled regions around attention, or as `NeoBERTBlock` where these cannot run."""

    def forward(self, x_TD, rotary, plan, tokens_S=None):
        """As `NeoBERTBlock.forward`."""
        is_compiled = not plan.need_weights and runs_compiled(x_TD, self)
        if not (is_compiled and self.has_own_parts() and runs_in_regions(self)):
            return super().forward(x_TD, rotary, plan, tokens_S)
        project, finish = compiled_regions()
        parts_THK = project(self, x_TD, rotary.table)
        out_THK, _ = self.attention(*parts_THK, plan)
        if tokens_S is not None:
            x_TD = x_TD.index_select(0, tokens_S)
            out_THK = out_THK.index_select(0, tokens_S)
        return finish(self, x_TD, out_THK)


def _normalize(x_TD, norm):
    # a float in arithmetic becomes an input of the graph; as an argument of F.rms_norm, everything would be compiled twice
    wide_TD = widen(x_TD)
    mean_square = wide_TD.square().mean(-1, keepdim=True)
    scale = (mean_square + norm.eps).rsqrt()
    out_TD = wide_TD * scale * norm.weight.to(wide_TD.dtype)
    return out_TD.to(norm.weight.dtype)


def project(
    block: nn.Module,
    x_TD: Tensor,
    table: Tensor,
) -> tuple[Tensor, ...]:
    """Queries, keys and values (T, H, K), contiguous, as `NeoBERTBlock.forward` computes them before attention."""
    qkv_TD = F.linear(_normalize(x_TD, block.attention_norm), block.qkv.weight)
    qkv_TH3K = qkv_TD.unflatten(-1, (-1, 3, block.head_dim))
    return tuple(x.contiguous() for x in split_and_rotate(qkv_TH3K, table))


def finish(
    block: nn.Module,
    x_TD: Tensor,
    out_THK: Tensor,
) -> Tensor:
    """The residual stream (T, D) after a block, as `NeoBERTBlock.forward` computes it after attention."""
    x_TD = x_TD + F.linear(out_THK.flatten(1), block.wo.weight)
    gate_up_TF = F.linear(_normalize(x_TD, block.ffn_norm), block.ffn.w12.weight)
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return x_TD + F.linear(F.silu(gate_TF) * up_TF, block.ffn.w3.weight)


@lru_cache
def compiled_regions():
    """`project` and `finish`, compiled at their first call."""
    return torch.compile(project, dynamic=True), torch.compile(finish, dynamic=True)


def fill(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Add documents of padding to documents of these lengths, so that there are few sizes of graphs.

    Returns:
        The lengths of all documents, a power of two of them, with a token or more each; and an upper bound of the lengths, 64
        times a power of four.
    """
    num_documents = 1 << len(lengths).bit_length()
    needed = sum(lengths) + num_documents - len(lengths)  # every document has a token
    rest = max(needed - SHORTEST_CAPTURED, 0)
    step = max(SHORTEST_CAPTURED, 1 << max(rest.bit_length() - 3, 0))
    last = 1 + SHORTEST_CAPTURED + -(-rest // step) * step - needed
    ones = [1] * (num_documents - len(lengths) - 1)
    filled = (*lengths, *ones, last)
    longest = SHORTEST_CAPTURED
    while longest < max(filled):
        longest *= 4
    return filled, longest


class GraphCache:
    """The CUDA graphs of an encoder, in place of its `run_blocks`, which runs where no graph can.

    They read its weights where they are, so a change in place has its effect.
    """

    lock = threading.Lock()  # of all copies: a process captures one graph at a time

    def __init__(self, encoder: nn.Module):
        self.encoder = weakref.ref(encoder)  # which would keep itself alive
        self.modules = tuple(encoder.modules())[1:]
        self.children = self._find_children(encoder)
        self.addresses = None
        self.graphs = {}
        self.is_on = True
        self.stream = self.pool = self.done = None

    def _find_children(self, encoder):
        children = []
        for module in (encoder, *self.modules):
            children += module._modules.values()
        return children

    def _find_addresses(self):
        addresses = []
        for module in self.modules:
            tensors = *module._parameters.values(), *module._buffers.values()
            addresses += [x.data_ptr() for x in tensors if x is not None]
        return addresses

    def __call__(self, tokens, plan, returned, select_tokens):
        """As `NeoBERTModel.run_blocks`."""
        encoder = self.encoder()
        assert encoder is not None  # it calls this
        x_TD = None
        if returned is None and not plan.need_weights and runs_compiled(encoder.encoder.weight, encoder):
            x_TD = self.replay(encoder, tokens, plan)
        if x_TD is None:
            return type(encoder).run_blocks(encoder, tokens, plan, returned, select_tokens)
        return x_TD, (), (), None

    def replay(
        self,
        encoder: nn.Module,
        tokens: Tensor,
        plan: ForwardPlan,
    ) -> Tensor | None:
        """The states (T, D) after the last norm, a copy of what the graph writes; None if no graph can compute them.

        Args:
            tokens: (B, L) ids, whose values were checked.
            plan: Plan of the forward; the lengths of its documents are on the host.
        """
        layout, config = plan.layout, encoder.config
        if not (self.is_on and layout.lengths and tokens.ndim == 2):
            return None
        if not find_backend(plan.backend).reads_boundaries:
            return None
        lengths, longest = fill(layout.lengths)
        num_tokens, num_filled = sum(layout.lengths), sum(lengths)
        if num_filled > min(LONGEST_CAPTURED, max(1.25 * num_tokens, num_tokens + SHORTEST_CAPTURED)):
            return None
        if self._find_children(encoder) != self.children or is_hooked(*self.modules):
            return None
        rotary = str(config.rope_parameters), config.max_position_embeddings
        key = num_filled, len(lengths), longest, plan.backend, *rotary
        boundaries = torch.tensor([0, *lengths], device="cpu").cumsum(0).int()
        boundaries = to_device(boundaries, tokens.device)
        with self.lock, torch.cuda.device(tokens.device):
            stream = torch.cuda.current_stream()
            if self.done is not None:
                stream.wait_event(self.done)  # a graph may still run on the stream of another thread
            addresses = self._find_addresses()
            if addresses != self.addresses:
                self.addresses = addresses
                self.graphs.clear()  # they would read weights that were replaced
            if key not in self.graphs and not self._capture(encoder, boundaries, key, stream):
                return None
            graph, inputs, states_TD = self.graphs[key]
            new = layout.flatten(tokens), layout.position_ids, boundaries
            for target, values in zip(inputs, new):
                target.view(-1)[: len(values)].copy_(values)
            graph.replay()
            states_TD = states_TD[:num_tokens].clone()
            self.done = stream.record_event()
        return states_TD

    def _capture(self, encoder, boundaries, key, stream):
        """Whether a graph could be made, which `key` describes: tokens, documents, longest, and what the config says."""
        if len(self.graphs) == MOST_GRAPHS:
            return False
        num_tokens, _, longest, *_ = key
        with torch.inference_mode(False):  # a tensor that is made in inference mode cannot be changed outside of it
            ids, positions = torch.zeros(2, 1, num_tokens, dtype=torch.long, device=boundaries.device)
            boundaries = boundaries.clone()
        arguments = dict(
            input_ids=ids,
            position_ids=positions,
            cu_seq_lens_q=boundaries,
            max_length_q=longest,
            trust_boundaries=True,
            return_packed=True,
            return_dict=True,
        )
        encoder(**arguments)  # compiles, and chooses the configurations of the kernels
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        # the stream that torch would choose is on the GPU of the first capture of the process
        self.stream = self.stream or torch.cuda.Stream(boundaries.device)
        try:
            # other threads may allocate memory meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                states_TD = encoder(**arguments).last_hidden_state
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that cannot end leaves its own
            self.is_on = False
            self.graphs.clear()
            logger.warning_once(
                f"No CUDA graph of {num_tokens} tokens: {error}. This inference copy goes on without graphs, so short inputs "
                "take longer; a new copy tries again"
            )
            return False
        self.graphs[key] = graph, (ids, positions, boundaries), states_TD
        return True


def make_compiled(encoder: nn.Module, cuda_graphs: bool) -> None:
    """Make an encoder of an inference copy on a GPU run in compiled regions, and also as CUDA graphs."""
    for block in encoder.transformer_encoder:
        if type(block) is NeoBERTBlock and type(block.attention) is NeoBERTAttention:
            block.__class__ = CompiledBlock
    if cuda_graphs:
        encoder.run_blocks = GraphCache(encoder)
