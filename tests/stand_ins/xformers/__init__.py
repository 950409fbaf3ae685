"""Stand-in for xformers: its signatures, implemented in PyTorch, for tests/model/test_backends_neobert.py."""

__version__ = "0.0.35"
