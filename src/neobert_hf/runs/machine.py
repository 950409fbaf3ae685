"""The machine and the versions that a result belongs to, in the same form for every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from ..model.machine_neobert import has_amx, has_bf16_instructions


def limit_threads() -> None:
    """Let torch use at most the cores that this process may use, by its affinity and the quota of its control group.

    OMP_NUM_THREADS overrides it.
    """
    from joblib import cpu_count  # of scikit-learn, which the base package lacks

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), cpu_count()))


def environment() -> dict:
    """Return processor, its vector instructions, number of cores, GPU, and the versions of Python, torch and transformers."""
    file = Path("/proc/cpuinfo")
    facts: dict[str, str] = {}
    if file.exists():
        first, _, _ = file.read_text().partition("\n\n")
        for line in first.splitlines():
            name, _, value = line.partition(":")
            facts[name.strip()] = value.strip()
    processor = facts.get("model name") or platform.processor() or platform.machine()
    instructions = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX-512")
    instructions += " with bf16" if has_bf16_instructions() else " only"
    if has_amx():
        instructions += " and AMX"
    if instructions == "AVX2 only" and "avx512f" in facts.get("flags", "").split():
        instructions += " (its AVX-512 hidden)"  # by ATEN_CPU_CAPABILITY
    return {
        "processor": processor,
        "instructions": instructions,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }
