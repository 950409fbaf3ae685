"""Compiles the templates of flex attention to the machine code of two GPUs; a program that test_triton.py starts.

    python compile_generated_kernels.py FOLDER

FOLDER has the results of run_generated_kernels.py. It receives `compiled.json`: name, compute capability and bytes of shared
memory of each compiled kernel. The kernels that inductor fuses itself need little of it, and are not compiled.
"""

import json
import sys
from pathlib import Path

import interpreted_gpu
import torch
import triton
from torch._inductor.codecache import PyCodeCache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = 75, 90  # T4, which has the least shared memory, and H100


def shared_memory(name: str, source: str, capability: int) -> int:
    """Compile the first configuration that inductor chose for the kernel; its shared memory in bytes."""
    kernel = getattr(PyCodeCache.load(source), name)
    config = kernel.configs[0]
    meta = kernel._create_compile_meta(config)
    code = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    binary = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(binary.asm["cubin"]) > 0
    return binary.metadata.shared


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    kernels = {each for file in folder.glob("*.result") for each in torch.load(file)["sources"] if "_tem_" in each[0]}
    with interpreted_gpu.answers_of_a_gpu():
        needs = [
            (name, capability, shared_memory(name, source, capability))
            for name, source in sorted(kernels)
            for capability in CAPABILITIES
        ]
    (folder / "compiled.json").write_text(json.dumps(needs))
