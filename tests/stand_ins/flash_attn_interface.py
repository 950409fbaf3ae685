"""Stand-in for FlashAttention 3 beta (folder hopper): its signatures, implemented in PyTorch."""

from flash_attn import attend_packed, flash_attn_func

num_calls = 0


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
):  # fmt: skip
    """FlashAttention 3, which has no dropout."""
    global num_calls
    num_calls += 1
    return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)


flash_attn_with_kvcache = flash_attn_func
