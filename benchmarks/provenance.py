"""Provenance of a result: machine, versions and commit, in the same form for every benchmark."""

import re
import subprocess
from pathlib import Path

from neobert_hf.runs import environment

EPYC_GENERATIONS = {("23", "49"): "second", ("25", "1"): "third", ("25", "17"): "fourth", ("26", "2"): "fifth"}


def provenance() -> dict:
    """Describe the machine, the versions and the commit that a result belongs to."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "../src"], capture_output=True, text=True).stdout.strip()
    machine = environment()
    if machine["processor"] == "AMD EPYC":  # of a cloud; family and model identify the generation
        facts = dict(re.findall(r"(?m)^(cpu family|model)\s*: (\d+)", Path("/proc/cpuinfo").read_text()))
        generation = EPYC_GENERATIONS.get((facts["cpu family"], facts["model"]))
        machine["processor"] += f", {generation} generation" * bool(generation)
    return {**machine, "commit": commit + ("+changes" if changed else "")}
