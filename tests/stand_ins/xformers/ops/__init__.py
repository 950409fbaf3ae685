"""The names of `xformers.ops` that the backend reads."""

from . import fmha
from .fmha import memory_efficient_attention

__all__ = ["fmha", "memory_efficient_attention"]
