"""The memory that a process can still allocate: the machine's, and at most what its control group has left."""

import pytest

from neobert_hf.embeddings import memory

GB = 2**30


@pytest.mark.parametrize("free, wanted", [(10 * GB, 2 * GB), (GB, GB)])
def test_the_smaller_of_machine_and_control_group_counts(tmp_path, monkeypatch, free, wanted):
    """The group may use 4 GB and uses 3, of which 1 is files in the cache."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {free // 1024} kB\n")
    for name, content in {"max": 4 * GB, "current": 3 * GB, "stat": f"anon 5\ninactive_file {GB}\n"}.items():
        (tmp_path / f"memory.{name}").write_text(str(content))
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
    assert memory.available_bytes() == wanted
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() == free
