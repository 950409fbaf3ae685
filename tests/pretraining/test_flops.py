"""Floating-point operations of a training step: ours against those that PyTorch's counter sees in a real one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.model.machine_neobert import TORCH
from neobert_hf.pretraining.flops import matrix_flops_per_s, training_flops


@pytest.fixture(autouse=True)
def the_counter_changes_nothing(monkeypatch):
    """The counter has hooks on all modules, and for hooks the last block computes all tokens, not only those of the head."""
    monkeypatch.setattr(TORCH, "has_global_hooks", lambda: False)


def counted(config, lengths, is_packed, attn_implementation):
    """(operations of linear layers, those of eager attention, ours) of a forward and backward of documents with these lengths."""
    model = NeoBERTForMaskedLM._from_config(config, attn_implementation=attn_implementation)
    model.config.sparse_prediction = True
    if is_packed:
        ids = torch.randint(5, config.vocab_size, (1, sum(lengths)))
        inputs = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
        is_real = torch.ones_like(ids, dtype=torch.bool)
    else:
        is_real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids = torch.randint(5, config.vocab_size, is_real.shape)
        inputs = {"attention_mask": is_real.long()}
    labels = torch.where(is_real & (torch.arange(ids.shape[1]) % 5 == 0), ids, -100)
    with FlopCounterMode(display=False) as counter:
        model(ids, **inputs, labels=labels).loss.backward()
    by_operation = counter.get_flop_counts()["Global"]
    squares = sum(length**2 for length in lengths)
    ours = training_flops(model, sum(lengths), int((labels != -100).sum()), squares)
    linear = sum(by_operation.get(operation, 0) for operation in (torch.ops.aten.mm, torch.ops.aten.addmm))
    return linear, by_operation.get(torch.ops.aten.bmm, 0), ours


@pytest.mark.parametrize("lengths", [[16, 16, 16], [24]])
def test_operations_are_those_that_a_rectangular_batch_computes(tiny_config, lengths):
    """Without padding, eager attention computes what the result needs and nothing else, all in products that are counted."""
    linear, in_attention, ours = counted(tiny_config, lengths, is_packed=False, attn_implementation="eager")
    assert ours == linear + in_attention


@pytest.mark.parametrize("attn_implementation, pairs", [("sdpa", 13**2 + 7**2), ("eager", 20**2)])
def test_operations_of_packed_rows_are_not_those_of_masked_attention(tiny_config, attn_implementation, pairs):
    """Eager attention computes the whole row, 20 x 20; SDPA in training on a CPU computes each document."""
    linear, in_attention, ours = counted(tiny_config, [13, 7], True, attn_implementation)
    per_pair = 3 * 4 * tiny_config.hidden_size * tiny_config.num_hidden_layers
    assert in_attention == per_pair * pairs
    assert ours == linear + per_pair * (13**2 + 7**2)


def test_a_slow_device_has_a_rate_too():
    """A device whose first product takes longer than the given time, since it loads libraries."""
    assert matrix_flops_per_s(torch.device("cpu"), torch.float32, seconds=0) > 0
