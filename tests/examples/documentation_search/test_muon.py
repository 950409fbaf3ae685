"""Muon beside AdamW: which parameters each of them updates, the update, and one state for both."""

import copy

import pytest
import torch
from torch import nn

from neobert_hf.pretraining import muon
from neobert_hf.pretraining.muon import Float32Muon, muon_with_adamw, orthogonalized

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon (torch >= 2.9)")


def model():
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False))
    return nn.ModuleDict({"embedding": nn.Embedding(20, 12), "blocks": blocks})


def step(module, optimizer):
    optimizer.zero_grad()
    module["blocks"](module["embedding"](torch.arange(20))).pow(2).sum().backward()
    optimizer.step()


def test_matrices_of_the_blocks_move_by_an_orthogonal_matrix_and_all_other_parameters_by_adamw():
    module = model()
    before = copy.deepcopy(module)
    step(module, muon_with_adamw([module], module["blocks"], 0.01, 0.1, weight_decay=0.0))
    change = before["blocks"][2].weight - module["blocks"][2].weight
    scale = 0.1 * 0.2 * 8**0.5  # learning rate x 0.2 sqrt(longer side): arXiv 2502.16982, equation 4
    singular = torch.linalg.svdvals(change.detach()) / scale
    # five Newton-Schulz steps bring all but the smallest singular values of the gradient into this range
    assert singular.median() > 0.6 and singular.max() < 1.3
    for name, index in (("embedding", None), ("blocks", 1)):
        changed, kept = (each[name] if index is None else each[name][index] for each in (module, before))
        moved = (changed.weight - kept.weight).abs().detach()
        assert moved.max() == pytest.approx(0.01, rel=1e-3)  # the first step of Adam


def test_a_schedule_and_a_restored_state_reach_both_optimizers():
    torch.manual_seed(1)
    first, second = model(), model()
    one, two = (muon_with_adamw([each], each["blocks"], 0.01, 0.1, weight_decay=0.1) for each in (first, second))
    for _ in range(3):
        step(first, one)
    second.load_state_dict(first.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for optimizer, module in ((one, first), (two, second)):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        step(module, optimizer)
    for left, right in zip(first.parameters(), second.parameters()):
        torch.testing.assert_close(left, right, atol=0, rtol=0)
    assert [group["lr"] for group in two.param_groups] == [0.05, 0.005]
    assert [part.param_groups[0]["lr"] for part in two.parts.values()] == [0.05, 0.005]


def test_parameters_that_two_modules_share_are_trained_once():
    module = model()
    optimizer = muon_with_adamw([module, module["embedding"]], module["blocks"], 0.01, 0.1, weight_decay=0.0)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(trained) == len(set(trained)) == len(list(module.parameters()))


@pytest.mark.parametrize("shape", [(12, 12), (6, 20), (20, 6)])
def test_the_iteration_applies_its_polynomial_to_the_singular_values_and_keeps_the_singular_vectors(shape):
    matrix, coefficients = torch.randn(shape, dtype=torch.float64), (3.4445, -4.775, 2.0315)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = coefficients[0] * values + coefficients[1] * values**3 + coefficients[2] * values**5
    expected = left @ torch.diag(values) @ right
    torch.testing.assert_close(orthogonalized(matrix, coefficients, 5, 1e-7), expected, atol=1e-10, rtol=0)


def test_float32_muon_takes_the_steps_of_torchs_muon_and_resumes_from_its_state():
    """The bound is of bfloat16: torch's products have 8 bits, and five steps multiply 15 times."""
    options = dict(lr=0.05, weight_decay=0.1)
    weights = [nn.Parameter(torch.linspace(-1, 1, 96).sin().reshape(8, 12).clone()) for _ in range(2)]
    theirs = torch.optim.Muon([weights[0]], **options, adjust_lr_fn="match_rms_adamw")
    ours = Float32Muon([weights[1]], **options)
    targets = torch.randn(6, 8, 12)
    for target in targets:
        before = weights[0].detach().clone()
        weights[1].data.copy_(before)
        for weight, optimizer in zip(weights, (theirs, ours)):
            weight.grad = weight.detach() - target
            optimizer.step()
        moved = (weights[0] - before).norm()
        assert (weights[0] - weights[1]).norm() <= 15 * 2**-8 * moved
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(*(next(iter(each.state.values()))["momentum_buffer"] for each in (theirs, ours)))


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, "Float32Muon"), (torch.bfloat16, "Muon")], ids=["no bf16", "bf16"]
)
def test_the_products_are_in_float32_on_a_processor_without_bf16(monkeypatch, dtype, expected):
    monkeypatch.setattr(muon, "best_dtype", lambda: dtype)
    module = model()
    optimizer = muon_with_adamw([module], module["blocks"], 0.01, 0.1, weight_decay=0.0)
    assert type(optimizer.parts["muon"]).__name__ == expected
