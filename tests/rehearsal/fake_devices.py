"""A device without hardware: tensors of a GPU that are a fake tensor for the rules of torch and a CPU tensor for the values.

Every operation runs twice: in torch's `FakeTensorMode`, with the shape, dtype and device rules of the real operator on the real
device type, and on the CPU, so that values that the host reads are right. Tensors on the CPU are real.
"""

import contextlib
import sys
import traceback
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

aten = torch.ops.aten


class DeviceTensor(torch.Tensor):
    """A tensor on the device: `fake` for the rules, `twin`, on the CPU, for the values.

    A torch without the device's backend cannot make a tensor there; the C++ code of torch then sees the device "meta".
    """

    @staticmethod
    def __new__(cls, fake, twin):
        device = fake.device if fake.device.type == "cuda" else "meta"
        options = dict(strides=fake.stride(), storage_offset=fake.storage_offset(), dtype=fake.dtype, device=device)
        tensor = torch.Tensor._make_wrapper_subclass(cls, fake.size(), **options)
        tensor.fake, tensor.twin = fake, twin
        return tensor

    device = property(lambda self: self.fake.device)
    is_cuda = property(lambda self: self.device.type == "cuda")
    is_meta = property(lambda self: False)

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self):
        return f"{self.device} {self.dtype} {tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        raise AssertionError(f"{operator} ran outside of FakeDevice")


class Wait(NamedTuple):
    """An operation for which the host waits for the device, and the line of this library, or of transformers, that runs it."""

    operator: str
    line: str


class FakeDevice(TorchDispatchMode):
    """While it is active, tensors of `device` are `DeviceTensor`; `waits` lists where the host waits for the device.

    Args:
        device: With an index, because torch would ask the driver for the current device.
    """

    def __init__(self, device: str):
        super().__init__()
        self.device, self.rules = torch.device(device), FakeTensorMode()
        self.waits: list[Wait] = []
        self.operators: set[str] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.operators.add(str(operator))
        if operator is aten._pin_memory.default:
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, DeviceTensor) or self._is_device(leaf) for leaf in leaves):
            return operator(*args, **kwargs)
        twin = self._run_on_cpu(operator, args, kwargs)
        try:
            fake_args, fake_kwargs = tree_map(self._fake, (args, kwargs))
            with self.rules:
                fake = operator(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self._wait(operator)
            if not isinstance(twin, torch.Tensor):
                return twin
            with self.rules:
                fake = torch.empty_strided(twin.shape, twin.stride(), dtype=twin.dtype, device=self.device)
        if self._copies_and_waits(operator, args, kwargs, fake):
            self._wait(operator)
        if operator._schema.name.endswith("_"):  # in place
            return args[0]
        return tree_map(self._join, fake, tree_map_only(torch.Tensor, lambda x: None, fake) if twin is None else twin)

    def _is_device(self, leaf):
        return isinstance(leaf, torch.device) and leaf.type in (self.device.type, "meta")

    def _fake(self, leaf):
        if isinstance(leaf, DeviceTensor):
            return leaf.fake
        if isinstance(leaf, torch.Tensor):
            return self.rules.from_tensor(leaf)
        return self.device if self._is_device(leaf) else leaf

    def _twin(self, leaf):
        if isinstance(leaf, DeviceTensor):
            return leaf.twin
        return torch.device("cpu") if self._is_device(leaf) else leaf

    def _run_on_cpu(self, operator, args, kwargs):
        """The values; None if the CPU has no such kernel."""
        args, kwargs = tree_map(self._twin, (args, kwargs))
        if str(operator) in TWINS:
            return TWINS[str(operator)](*args, **kwargs)
        try:
            return operator(*args, **kwargs)
        except NotImplementedError:
            return None

    def _join(self, fake, twin):
        if not isinstance(fake, torch.Tensor):
            return fake
        if fake.device.type == "cpu":
            return twin
        assert fake.device == self.device, fake.device
        if twin is None:
            twin = torch.zeros(fake.shape, dtype=fake.dtype)
        assert fake.shape == twin.shape and fake.dtype == twin.dtype, (fake, twin.shape, twin.dtype)
        return DeviceTensor(fake, twin)

    def _copies_and_waits(self, operator, args, kwargs, fake):
        """Whether this is a copy between host and device that is not asynchronous; from the host, it must be pinned for that."""
        if operator is aten._to_copy.default:
            source, device = args[0], fake.device
        elif operator is aten.copy_.default:
            source, device = args[1], args[0].device
        else:
            return False
        is_asynchronous = kwargs.get("non_blocking") and getattr(source, "is_pinned_here", False)
        return source.device.type != device.type and not is_asynchronous

    def _wait(self, operator):
        frames = [frame for frame in traceback.extract_stack(sys._getframe(2)) if "neobert_hf" in frame.filename]
        self.waits.append(Wait(str(operator), f"{frames[-1].name}: {frames[-1].line}" if frames else ""))

    @contextlib.contextmanager
    def kernel(self):
        """In this context the stand-in of a kernel runs, which reads on the device what the stand-in reads on the host."""
        waits = list(self.waits)
        yield
        self.waits[:] = waits


def move(model: torch.nn.Module, device: str) -> torch.nn.Module:
    """`model.to(device)`, which would keep the class of the parameters."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = tensor.detach().to(device)
                    if tensors is module._parameters:
                        tensors[name] = torch.nn.Parameter(tensors[name], tensor.requires_grad)
    return model


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()` without the autograd engine, which asks the driver for a stream: calls the derivative of each operation.

    As the engine does, it sums a gradient to the shape of what it belongs to, and converts its dtype. A gradient must be on the
    device of what it belongs to, which the engine would not mend.
    """
    order, seen, stack = [], set(), [(loss.grad_fn, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    gradients = {loss.grad_fn: {0: torch.ones_like(loss)}}
    with torch.no_grad():
        for node in reversed(order):
            given = gradients.pop(node, {})
            if hasattr(node, "variable"):  # a leaf
                variable, gradient = node.variable, given.get(0)
                if gradient is not None:
                    variable.grad = gradient if variable.grad is None else variable.grad + gradient
                continue
            inputs = [given.get(number) for number in range(len(node._input_metadata))]
            found = (node.apply if hasattr(node, "apply") else node)(*inputs)
            found = found if isinstance(found, tuple) else (found,)
            for (following, number), gradient in zip(node.next_functions, found):
                if following is None or gradient is None:
                    continue
                gradient = _as_engine(gradient, following._input_metadata[number])
                others = gradients.setdefault(following, {})
                others[number] = others[number] + gradient if number in others else gradient


def _as_engine(gradient, metadata):
    if tuple(gradient.shape) != tuple(metadata.shape):
        gradient = gradient.sum_to_size(tuple(metadata.shape))
    device = metadata.device if metadata.device.type != "meta" else gradient.device
    assert gradient.device == device, f"a gradient is on {gradient.device}, and what it belongs to on {device}"
    return gradient.to(metadata.dtype)


def _varlen(q, k, v, boundaries, *args):
    lengths = boundaries.diff().tolist()
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)))
    output = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=1).transpose(0, 1)
    return output.contiguous(), torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def _rms_norm_backward(grad, x, shape, rstd, weight, mask):
    wide, normed = grad.float() * weight.float(), x.float() * rstd
    grad_x = rstd * (wide - normed * (wide * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)


def _softmax(x, dim, is_widened):
    return (x.float() if is_widened else x).softmax(dim)


def _softmax_backward(grad, out, dim, dtype):
    return (out * (grad - (out * grad).sum(dim, keepdim=True))).to(dtype)


# Values of an operator that has no kernel on a CPU, or only marks its result; without an entry they are zeros.
TWINS = {
    "torch_attn._varlen_attn.default": _varlen,
    "aten._conj.default": torch.conj_physical,
    "aten._softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
}
