"""The machine and the versions that a result belongs to, in the same form for every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from ..model.machine_neobert import has_bf16_instructions

# Cloud machines report "AMD EPYC" only; family and model identify the generation.
EPYC_GENERATIONS = {(23, 49): "second", (25, 1): "third", (25, 17): "fourth", (26, 2): "fifth"}


def environment() -> dict:
    """Return processor, its vector instructions, number of cores, GPU, and the versions of Python, torch and transformers."""
    return {
        "processor": _processor(),
        "instructions": _instructions(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }


def _processor() -> str:
    facts = _cpuinfo()
    name = facts.get("model name") or platform.processor() or platform.machine()
    family = (int(facts.get("cpu family", 0)), int(facts.get("model", 0)))
    return (
        f"{name}, {EPYC_GENERATIONS[family]} generation" if name == "AMD EPYC" and family in EPYC_GENERATIONS else name
    )


def _instructions() -> str:
    """The vector instructions that torch uses, and whether larger ones are hidden from it."""
    used = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX-512")
    if has_bf16_instructions():
        return f"{used} with bf16"
    is_hidden = used == "AVX2" and "avx512f" in _cpuinfo().get("flags", "").split()
    return f"{used} only" + (" (its AVX-512 hidden)" if is_hidden else "")


def _cpuinfo() -> dict[str, str]:
    """The entries of the first processor; empty where the file does not exist."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return {}
    lines = (line.partition(":") for line in file.read_text().split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
