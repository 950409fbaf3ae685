"""The allocator: tuned on glibc, a message elsewhere."""

import platform
import subprocess
import sys

import pytest

from neobert_hf import tune_allocator

# Counts the page faults of making the same large tensor again and again.
PAGE_FAULTS = """
import resource, torch
from neobert_hf import tune_allocator
if {tuned}:
    assert tune_allocator()
torch.empty(2**24).fill_(1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.empty(2**24).fill_(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_tensors_reuse_their_memory_once_tuned():
    def faults(tuned):
        script = PAGE_FAULTS.format(tuned=tuned)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        return int(done.stdout)

    tuned = min(faults(True) for _ in range(3))  # a machine short of memory takes pages back in between
    assert 5 * tuned < faults(False)


@pytest.mark.parametrize(("system", "library"), [("Darwin", ""), ("Linux", "")])
def test_elsewhere_it_says_that_nothing_changed(monkeypatch, caplog, system, library):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "libc_ver", lambda: (library, ""))
    assert tune_allocator() is False
    assert f"nothing changed on {system} with another C library" in caplog.text
