"""Makes torch.compile generate the Triton kernels of a GPU that is not there, and runs them in Triton's interpreter on the CPU.

A program that calls `pretend` keeps its tensors on the CPU. PyTorch traces their graphs, forward and backward, on the CPU.
Inductor then gets every graph with the device "cuda" in place of "cpu", and generates the code that this GPU would run. The code
runs on the tensors of the CPU: its Triton kernels in the interpreter (NumPy), its matrix products in PyTorch's CPU operators.

Set TRITON_INTERPRET=1 before the import of triton, in a process of its own: nothing here is undone.
"""

import contextlib
import dataclasses
import types
from collections import Counter
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo.device_interface
import torch._inductor.compile_fx
import torch.nn.attention.flex_attention as flex
import triton
import triton.language as tl
from torch._guards import detect_fake_mode
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpretedFunction, TensorHandle, interpreter_builder, interpreter_semantic

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
# An H100, but with 8 multiprocessors in place of 132: for short inputs flex attention splits the keys over all of them.
PROPERTIES = types.SimpleNamespace(major=CAPABILITY[0], multi_processor_count=8, warp_size=32)
PROPERTIES.regs_per_multiprocessor, PROPERTIES.max_threads_per_block = 65536, 1024
PROPERTIES.max_threads_per_multi_processor = 2048
launches = Counter()  # how often the interpreter ran a generated kernel, by name
sources = []  # name and source of every generated kernel


class Driver:
    """In place of Triton's driver, which needs libcuda."""

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)


def pretend() -> None:
    """From now on, torch.compile generates kernels for the GPU and runs them in the interpreter."""
    _run_generated_code_on_the_cpu()
    _choose_the_gpu_in_flex_attention()
    _mend_the_interpreter()
    compile_graph = torch._inductor.compile_fx._compile_fx_inner

    def compile_for_gpu(graph, inputs, **kwargs):
        mode = detect_fake_mode(inputs)
        with answers_of_a_gpu():
            for module in graph.modules():
                if isinstance(module, torch.fx.GraphModule):
                    _move(module, mode)
            return compile_graph(graph, [_on_gpu(x, mode) for x in inputs], **kwargs)

    torch._inductor.compile_fx._compile_fx_inner = compile_for_gpu

    load_kernel, run_kernel = AsyncCompile.triton, CachingAutotuner.run

    def load_and_keep(self, name, source, **kwargs):
        sources.append((name, source))
        return load_kernel(self, name, source, **kwargs)

    def run_and_count(self, *args, **kwargs):
        assert isinstance(self.fn, InterpretedFunction)
        launches[self.fn.__name__] += 1
        return run_kernel(self, *args, **kwargs)

    AsyncCompile.triton, CachingAutotuner.run = load_and_keep, run_and_count


def _move(graph_module, mode):
    for node in graph_module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": GPU}
        if "val" in node.meta:
            node.meta["val"] = tree_map(lambda value: _on_gpu(value, mode), node.meta["val"])
    graph_module.recompile()


def _on_gpu(value, mode):
    if not isinstance(value, FakeTensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)


@contextlib.contextmanager
def answers_of_a_gpu():
    """Within, PyTorch and Triton answer what inductor asks about the GPU. Elsewhere PyTorch must not see one: it would ask it."""
    answers = dict(
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_properties=lambda device=None: PROPERTIES,
        get_device_capability=lambda device=None: CAPABILITY,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: None,
        _exchange_device=lambda device: 0,
        _maybe_exchange_device=lambda device: 0,
    )
    interface = torch._dynamo.device_interface.CudaInterface
    of_interface = {name: staticmethod(answer) for name, answer in answers.items() if hasattr(interface, name)}
    nvidia = dataclasses.replace(triton.backends.backends["nvidia"], driver=Driver)
    triton.runtime.driver.set_active(Driver())
    with (
        patch.multiple(torch.cuda, **answers),
        patch.multiple(interface, **of_interface, Worker=interface),
        patch.dict(triton.backends.backends, nvidia=nvidia),
    ):
        torch.utils._triton.has_triton.cache_clear()
        yield


def _run_generated_code_on_the_cpu():
    """The code around the kernels allocates its tensors on the CPU, and chooses no device and no stream."""
    torch.cuda._DeviceGuard = lambda device: contextlib.nullcontext()
    torch.cuda.set_device = lambda device: None
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._dynamo.guards._empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cpu


def _choose_the_gpu_in_flex_attention():
    """Undo what flex attention does otherwise for tensors on a CPU: it refuses gradients, and does not keep the log-sum-exp."""
    find_options = flex._apply_kernel_options
    flex._validate_device = lambda query, key, value: None
    flex._apply_kernel_options = lambda *args, **kwargs: (
        find_options(*args, **kwargs) | {"OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}
    )


def _mend_the_interpreter():
    """Give the interpreter (Triton 3.8) what it lacks."""
    # functions of CUDA's library libdevice, which are empty there
    functions = dict(exp=np.exp, exp2=np.exp2, log2=np.log2, pow=np.power, rsqrt=lambda x: 1 / np.sqrt(x))
    for name, function in functions.items():
        setattr(libdevice, name, _in_numpy(function))
    # an atomic operation reads a mask that was broadcast along a row beyond its end
    add = interpreter_builder.create_atomic_rmw

    def add_with_whole_mask(operation, pointer, value, mask, *args):
        return add(operation, pointer, value, TensorHandle(np.ascontiguousarray(mask.data), mask.dtype), *args)

    interpreter_builder.create_atomic_rmw = add_with_whole_mask


def _in_numpy(function):
    def call(*operands):
        operands = [interpreter_semantic.to_tensor(operand) for operand in operands]
        dtype = operands[0].dtype.scalar
        result = np.asarray(function(*(operand.handle.data for operand in operands)))
        is_block = any(operand.type.is_block() for operand in operands)
        return tl.tensor(TensorHandle(result, dtype), tl.block_type(dtype, list(result.shape)) if is_block else dtype)

    return call
