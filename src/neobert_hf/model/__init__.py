"""The model: the files that ship to the Hub. They import no other part of the package.

Read them in this order: modeling, layout, plan, attention, blocks.
"""

from . import modeling_neobert
from .blocks_neobert import NeoBERTAttention, RMSNorm, SwiGLU
from .inference_neobert import inference_copy
from .machine_neobert import best_dtype
from .modeling_neobert import *  # noqa: F403  (its `__all__` is the list of classes)

__all__ = [*modeling_neobert.__all__, "NeoBERTAttention", "RMSNorm", "SwiGLU", "best_dtype", "inference_copy"]
