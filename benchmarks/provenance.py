"""Where a result comes from: machine, versions and commit, the same for every benchmark."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch


def provenance() -> dict:
    """Describe the machine, the versions and the commit that a result belongs to."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "../src"], capture_output=True, text=True).stdout.strip()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "commit": commit + ("+changes" if changed else ""),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
