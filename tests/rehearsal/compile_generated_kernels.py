"""Compiles generated Triton kernels to the machine code of several GPUs; a program that test_triton.py starts.

    python compile_generated_kernels.py FOLDER

FOLDER has the files of run_generated_kernels.py. It receives `compiled.json`: name, compute capability and bytes of shared memory
of each compiled kernel. Kernels that inductor fuses compile for the oldest GPU; the templates of flex attention, whose blocks
need much more, for all.
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

CAPABILITIES = 75, 80, 90, 100  # T4, A100, H100, B200


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
    results = [torch.load(file, weights_only=False) for file in sorted(folder.glob("*.pt"))]
    kernels = sorted({kernel for result in results for kernel in result["sources"]})
    with interpreted_gpu.answers_of_a_gpu():
        needs = [
            (name, capability, shared_memory(name, source, capability))
            for name, source in kernels
            for capability in (CAPABILITIES if "_tem_" in name else CAPABILITIES[:1])
        ]
    (folder / "compiled.json").write_text(json.dumps(needs))
