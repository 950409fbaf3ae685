"""Muon for the matrices of a model and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer


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
    muon = torch.optim.Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return MuonWithAdamW(muon, AdamW(list(others), lr=learning_rate, betas=betas, weight_decay=weight_decay))
