"""Provenance of a result: machine, versions and commit, in the same form for every benchmark."""

import subprocess
from pathlib import Path

from neobert_hf.runs import environment


def provenance() -> dict:
    """Describe the machine, the versions and the commit that a result belongs to."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "../src"], capture_output=True, text=True).stdout.strip()
    return {**environment(), "commit": commit + ("+changes" if changed else "")}
