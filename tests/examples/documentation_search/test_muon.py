"""Muon beside AdamW: which rule updates which parameter, both against torch's optimizers, and one state for both."""

import copy

import pytest
import torch
from muon import COEFFICIENTS, MuonWithAdamW, orthogonalized
from torch import nn

TARGETS = torch.randn(6, 8, 12, generator=torch.Generator().manual_seed(0))


def parameters():
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 12), (8, 12), (12,))]


def step(optimizer, matrix, table, norm, target):
    for parameter in (matrix, table):
        parameter.grad = parameter.detach() - target
    norm.grad = norm.detach() - target[0]
    optimizer.step()


@pytest.mark.parametrize("shape", [(12, 12), (6, 20), (20, 6)])
def test_the_iteration_applies_its_polynomial_to_the_singular_values_and_keeps_the_singular_vectors(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = sum(factor * values**power for factor, power in zip(COEFFICIENTS, (1, 3, 5)))
    expected = left @ torch.diag(values) @ right
    torch.testing.assert_close(orthogonalized(matrix), expected, atol=1e-10, rtol=0)


def test_a_matrix_moves_by_an_orthogonal_matrix_of_the_size_of_a_step_of_adam():
    matrix, table, norm = parameters()
    before = matrix.detach().clone()
    step(MuonWithAdamW([matrix], [table, norm], lr=0.1, weight_decay=0.0), matrix, table, norm, TARGETS[0])
    scale = 0.1 * 0.2 * 12**0.5  # learning rate x 0.2 sqrt(longer side): arXiv 2502.16982, equation 4
    singular = torch.linalg.svdvals((before - matrix).detach()) / scale
    # five steps of the iteration bring all but the smallest singular values of the gradient into this range
    assert singular.median() > 0.6 and singular.max() < 1.3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon (torch >= 2.9)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_take_the_steps_of_torchs_muon(dtype):
    """The bound is of bfloat16, in which torch computes: its products have 8 bits, and five steps multiply 15 times."""
    matrix, table, norm = parameters()
    theirs = nn.Parameter(matrix.detach().clone())
    peer = torch.optim.Muon([theirs], lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizer = MuonWithAdamW([matrix], [table, norm], lr=0.05, weight_decay=0.1, dtype=dtype)
    for target in TARGETS:
        before = theirs.detach().clone()
        matrix.data.copy_(before)
        theirs.grad = theirs.detach() - target
        peer.step()
        step(optimizer, matrix, table, norm, target)
        assert (theirs - matrix).norm() <= 15 * 2**-8 * (theirs - before).norm()


def test_other_parameters_take_the_steps_of_torchs_adamw():
    matrix, table, norm = parameters()
    theirs = [nn.Parameter(each.detach().clone()) for each in (table, norm)]
    peer = torch.optim.AdamW(theirs, lr=0.05, weight_decay=0.1, betas=(0.9, 0.98))
    optimizer = MuonWithAdamW([matrix], [table, norm], lr=0.05, weight_decay=0.1)
    for target in TARGETS:
        step(optimizer, matrix, table, norm, target)
        for parameter, part in zip(theirs, (target, target[0])):
            parameter.grad = parameter.detach() - part
        peer.step()
    torch.testing.assert_close([table, norm], theirs, atol=1e-6, rtol=0)  # two orders of roundings in float32


def test_a_schedule_and_a_restored_state_reach_both_rules():
    first, second = parameters(), parameters()
    one, two = (MuonWithAdamW(each[:1], each[1:], lr=0.05) for each in (first, second))
    for target in TARGETS[:3]:
        step(one, *first, target)
    for old, new in zip(second, first):
        old.data.copy_(new.data)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for optimizer, each in ((one, first), (two, second)):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        step(optimizer, *each, TARGETS[3])
        assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]
    torch.testing.assert_close(first, second, atol=0, rtol=0)
