"""Muon for the matrices of a model and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ..model.machine_neobert import best_dtype

MOONLIGHT = "match_rms_adamw"  # torch's name of the scale of arXiv 2502.16982


class Float32Muon(getattr(torch.optim, "Muon", Optimizer)):  # torch has Muon from 2.9 on
    """torch's Muon, but with the products in float32 instead of bfloat16.

    A processor without bf16 instructions emulates bfloat16. There the products of torch's Muon took 7 of the 10 seconds of a
    step of 16,384 tokens of a model with four layers of width 256. The state is that of torch's Muon, so a checkpoint of one
    resumes in the other. The update has the scale of Moonlight (arXiv 2502.16982, section 2.2), `adjust_lr_fn="match_rms_adamw"`
    of torch.

    Args:
        params: Matrices.
        **kwargs: As for torch's Muon, without `adjust_lr_fn`.
    """

    def __init__(self, params: Iterable[nn.Parameter], **kwargs) -> None:
        super().__init__(params, adjust_lr_fn=MOONLIGHT, **kwargs)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update all matrices."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            rate, momentum = float(group["lr"]), group["momentum"]
            for matrix in (each for each in group["params"] if each.grad is not None):
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                average = state["momentum_buffer"]
                average.lerp_(matrix.grad, 1 - momentum)
                update = matrix.grad.lerp(average, momentum) if group["nesterov"] else average
                update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * 0.2 * max(matrix.shape) ** 0.5)
        return loss


def orthogonalized(
    matrix_MN: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Return approximately the orthogonal factor of the polar decomposition of a matrix, in its own dtype.

    The singular values end near 1, not at 1, as in torch's Muon.

    Args:
        matrix_MN: (M, N).
        coefficients: Of x, x^3 and x^5 in the polynomial that each step applies to the singular values.
        num_steps: Number of steps.
        eps: Smallest norm by which the matrix is divided.

    Source: the Newton-Schulz iteration of kellerjordan.github.io/posts/muon.
    """
    a, b, c = coefficients
    wide = matrix_MN if matrix_MN.shape[0] <= matrix_MN.shape[1] else matrix_MN.T
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix_MN.shape[0] <= matrix_MN.shape[1] else wide.T


class MuonWithAdamW(Optimizer):
    """Two of torch's optimizers with one state: a learning rate schedule and a checkpoint cover both.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix. It needs fewer steps than AdamW, but each step
    costs matrix products whose number does not depend on the batch.

    Args:
        muon: Optimizer of the matrices.
        adamw: Optimizer of the other parameters.

    Source: Muon (kellerjordan.github.io/posts/muon) with the scale of Moonlight (arXiv 2502.16982), so that both optimizers
        have updates of equal size at equal learning rates.
    """

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        self.parts = {"muon": muon, "adamw": adamw}
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # a schedule writes learning rates into these dicts, and the parts read them
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update all parameters."""
        loss = closure() if closure is not None else None
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict:
        """The states of both optimizers by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore what `state_dict` returned."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self._share_groups()


def muon_with_adamw(
    modules: Iterable[nn.Module],
    blocks: nn.Module,
    learning_rate: float,
    muon_learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.98),
) -> MuonWithAdamW:
    """Return the optimizer of a model: Muon for the matrices of its blocks, AdamW for embeddings, norms and decoder.

    Muon computes in bfloat16, and in float32 on a CPU where that is the faster dtype (`best_dtype`).

    Args:
        modules: Modules to train; parameters that they share are trained once.
        blocks: Module whose matrices Muon updates, a part of `modules`.
        learning_rate: Of AdamW.
        muon_learning_rate: Of Muon.
        weight_decay: Of both.
        betas: Of AdamW; the second is the paper's.

    Raises:
        ImportError: torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(f"Muon needs torch>=2.9, but torch {torch.__version__} is installed; pip install -U torch")
    matrices = [parameter for parameter in blocks.parameters() if parameter.ndim == 2]
    others = {parameter: None for module in modules for parameter in module.parameters()}
    for parameter in matrices:
        del others[parameter]
    options = dict(lr=muon_learning_rate, weight_decay=weight_decay)
    if matrices[0].device.type == "cpu" and best_dtype() == torch.float32:
        muon = Float32Muon(matrices, **options)
    else:
        muon = torch.optim.Muon(matrices, **options, adjust_lr_fn=MOONLIGHT)
    return MuonWithAdamW(muon, AdamW(list(others), lr=learning_rate, betas=betas, weight_decay=weight_decay))
