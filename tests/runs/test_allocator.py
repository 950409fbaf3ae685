"""`tune_allocator`: fewer page faults on glibc, nothing changes on other systems."""

import platform
import subprocess
import sys

import pytest

from neobert_hf import tune_allocator
from neobert_hf.runs import allocator

# Counts the page faults of repeated large tensors, before and after tuning. Loads the module without the package.
PAGE_FAULTS = """
import resource, runpy, sys, torch

def faults():
    torch.empty(2**24).fill_(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.empty(2**24).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

untuned = faults()
assert runpy.run_path(sys.argv[1])["tune_allocator"]()
print(untuned, min(faults() for _ in range(3)))  # a machine with little memory reclaims pages in between
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt exists in glibc only")
def test_large_tensors_reuse_their_memory_after_tuning():
    command = [sys.executable, "-c", PAGE_FAULTS, allocator.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    untuned, tuned = map(int, done.stdout.split())
    assert 5 * tuned < untuned


@pytest.mark.parametrize(("system", "library"), [("Darwin", ""), ("Linux", "")])
def test_on_other_systems_nothing_changes(monkeypatch, system, library):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "libc_ver", lambda: (library, ""))
    assert tune_allocator() is False
