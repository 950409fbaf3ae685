"""Muon for the matrices of a model's blocks and AdamW for its other parameters, as one optimizer."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of x, x^3 and x^5
NUM_STEPS = 5


class MuonWithAdamW(Optimizer):
    """Two rules with one state, so that one learning rate schedule and one checkpoint cover both.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix. It needs fewer steps than AdamW. Its update has the
    scale of Moonlight, so both rules take steps of equal size at one learning rate.

    Args:
        matrices: Parameters with two axes for Muon.
        others: Parameters for AdamW.
        lr: Learning rate of both.
        weight_decay: Weight decay of both.
        betas: Of AdamW; the second is the paper's.
        eps: Of AdamW.
        dtype: Data type of Muon's products. bfloat16 takes most of the step on a processor that emulates it.

    Source: kellerjordan.github.io/posts/muon, and the scale of arXiv 2502.16982, section 2.2; AdamW, arXiv 1711.05101.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        groups = [{"params": list(matrices), "is_muon": True}, {"params": list(others), "is_muon": False}]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update = self._muon(parameter) if group["is_muon"] else self._adam(parameter, group)
                    parameter.add_(update, alpha=-group["lr"])

    def _muon(self, matrix_MN: nn.Parameter) -> torch.Tensor:
        state = self.state[matrix_MN]
        if not state:
            state["momentum"] = torch.zeros_like(matrix_MN)
        state["momentum"].lerp_(matrix_MN.grad, 1 - MOMENTUM)
        update = orthogonalized(matrix_MN.grad.lerp(state["momentum"], MOMENTUM).to(self.dtype))  # Nesterov's momentum
        return 0.2 * max(matrix_MN.shape) ** 0.5 * update

    def _adam(self, parameter: nn.Parameter, group: dict) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
        state["step"] += 1
        state["mean"].lerp_(parameter.grad, 1 - group["betas"][0])
        state["square"].lerp_(parameter.grad.square(), 1 - group["betas"][1])
        mean, square = (state[m] / (1 - b ** state["step"]) for m, b in zip(("mean", "square"), group["betas"]))
        return mean / (square.sqrt() + group["eps"])


def orthogonalized(matrix_MN: torch.Tensor) -> torch.Tensor:
    """Return approximately the orthogonal factor of the polar decomposition of a matrix, (M, N).

    The singular values end near 1, not at 1.

    Source: the Newton-Schulz iteration of kellerjordan.github.io/posts/muon.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    wide = matrix_MN.T if is_tall else matrix_MN
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(NUM_STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if is_tall else wide
