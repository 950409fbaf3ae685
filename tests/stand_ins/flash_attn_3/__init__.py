"""FlashAttention 3 keeps its compiled kernels in this package, and an old transformers searches for it."""
