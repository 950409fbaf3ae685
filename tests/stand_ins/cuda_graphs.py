"""CUDA graphs without CUDA: a capture records every operation that torch runs, a replay runs them again on the same tensors.

As in a real graph, a replay reads the tensors of the capture, and writes its results where those of the capture are.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neobert_hf.model.backends_neobert import BACKENDS


def attend(q_THK, k_THK, v_THK, plan):
    """In place of torch_varlen on a CPU: operations read the boundaries, as a kernel does, and Python does not."""
    sequence = torch.bucketize(torch.arange(len(q_THK)), plan.layout.cu_seq_lens[1:].long(), right=True)
    q, k, v = (x.transpose(0, 1) for x in (q_THK, k_THK, v_THK))
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=sequence[:, None] == sequence)
    return output.transpose(0, 1).contiguous(), None


CHANGES = dict(attend=attend, devices=(), capabilities={}, is_installed=lambda: True, is_automatic=False)
VARLEN = BACKENDS["torch_varlen"]._replace(**CHANGES)


class CUDAGraph:
    def __init__(self):
        self.operations, self.num_replays = [], 0
        self.is_inference = False  # tensors of a capture in inference mode are written in this mode only

    def replay(self):
        self.num_replays += 1
        with torch.inference_mode(self.is_inference), torch.no_grad():
            for operator, args, kwargs, results in self.operations:
                new = [leaf for leaf in tree_leaves(operator(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                for target, value in zip(results, new):
                    target.copy_(value)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph
        graph.is_inference = torch.is_inference_mode_enabled()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        result = operator(*args, **(kwargs or {}))
        # a view, and what an operation changes in place, are in the memory of an argument
        memory = set(map(_memory, tree_leaves((args, kwargs))))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        is_view = any(_memory(leaf) in memory for leaf in results)
        self.graph.operations.append((operator, args, kwargs or {}, [] if is_view else results))
        return result


def _memory(leaf):
    """Address of the memory of a tensor, or of the CPU tensor with its values; None for what is no tensor."""
    leaf = getattr(leaf, "twin", leaf)
    return leaf.untyped_storage().data_ptr() or id(leaf) if isinstance(leaf, torch.Tensor) else None


class Stream:
    """In place of a stream, on which operations of one thread run in order."""

    def __init__(self, device=None):
        self.device = device

    def wait_event(self, event):
        """Nothing to wait for."""

    def record_event(self):
        return object()


_recorders = []


def is_recording():
    return bool(_recorders)


@contextlib.contextmanager
def capture(graph, pool, stream, capture_error_mode):
    assert pool and stream.device and capture_error_mode == "thread_local" and not _recorders
    with _Recorder(graph) as recorder:
        _recorders.append(recorder)
        try:
            yield
        finally:
            _recorders.remove(recorder)


def install(monkeypatch):
    """Replace what the library calls of torch.cuda; returns the list of graphs that will be made."""
    graphs = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(CUDAGraph()) or graphs[-1])
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return graphs
