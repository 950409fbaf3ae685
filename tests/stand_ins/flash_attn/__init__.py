"""Stand-in for flash-attn 2.8: its signatures, implemented in PyTorch, for tests/model/test_backends_neobert.py."""

import torch
import torch.nn.functional as F

num_calls = 0


def attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    """The result of the kernels, with their requirements on the arguments."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert type(max_seqlen_q) is type(max_seqlen_k) is int and not causal
    assert all(x.ndim == 3 and x.stride(-1) == 1 for x in (q, k, v))
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) <= max_seqlen_q and sum(lengths) == len(q)
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)))
    outputs = [F.scaled_dot_product_attention(*part, scale=softmax_scale) for part in parts]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    global num_calls
    num_calls += 1
    assert dropout_p == 0.0 and window_size == (-1, -1) and softcap == 0.0
    return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)


def flash_attn_func(*args, **kwargs):
    """Never called: the layout is packed."""
    raise AssertionError("a packed layout needs the function for variable lengths")


flash_attn_with_kvcache = flash_attn_func
