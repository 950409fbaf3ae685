"""Muon for the matrices of the blocks and AdamW for the rest, and the check of an optimizer of the user's own."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from ..files.messages import first_of

# By name in, optimizer out; and the number of an optimizer step in, share of the peak learning rate out.
MakeOptimizer = Callable[[dict[str, nn.Parameter]], Optimizer]
Schedule = Callable[[int], float]

Muon = getattr(torch.optim, "Muon", Optimizer)  # `muon` refuses torch below 2.9, which has none
IN_BLOCK = re.compile(r"\.\d+\.")  # blocks are the numbered modules of a model


def muon(
    parameters: Mapping[str, nn.Parameter],
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    head_dim: int | None = None,
    no_decay: Collection[str] = (),
) -> Optimizer:
    """Return Muon for the matrices of the blocks, and AdamW for embeddings, norms, biases and the decoder, as one optimizer.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix. Its update has the scale of Moonlight, so both rules
    take steps of about the same size at one learning rate.

    Args:
        parameters: The parameters of a model by name.
        lr: Learning rate of both rules.
        weight_decay: Weight decay of both rules.
        betas: Of AdamW.
        eps: Of AdamW.
        head_dim: Width of an attention head of NeoBERT. With it, the fused matrices are orthogonalized in parts: query, key and
            value each, gate and up each. None orthogonalizes a fused matrix as one.
        no_decay: Names of the parameters of AdamW without weight decay.

    Raises:
        ImportError: torch is older than 2.9 and has no Muon.

    Source: torch.optim.Muon; the scale is that of arXiv 2502.16982, section 2.2.
    """
    if Muon is Optimizer:
        raise ImportError(f"torch {torch.__version__} has no Muon; install torch 2.9 or newer, or choose adamw")
    of_muon: dict[tuple, dict] = {}
    of_adamw: dict[bool, dict] = {}
    for name, parameter in parameters.items():
        is_decayed = name not in no_decay
        parts, rows = 1, None  # number of parts, and number of consecutive rows that belong to one part
        if head_dim and name.endswith(".qkv.weight"):
            parts, rows = 3, head_dim
        elif head_dim and name.endswith(".w12.weight"):
            parts, rows = 2, len(parameter) // 2
        if parameter.ndim == 2 and IN_BLOCK.search(name):
            group = of_muon.setdefault((parts, rows), {"params": [], "parts": parts, "rows": rows})
        else:
            group = of_adamw.setdefault(is_decayed, {"params": [], "weight_decay": weight_decay * is_decayed})
        group["params"].append(parameter)
    rule = MuonInParts(of_muon.values(), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    other = AdamW(of_adamw.values(), lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
    return MuonWithAdamW(rule, other)


class MuonWithAdamW(Optimizer):
    """Two optimizers with one list of groups and one state, so that one schedule and one checkpoint cover both."""

    def __init__(self, muon: Optimizer, adamw: Optimizer):
        self.rules = {"muon": muon, "adamw": adamw}
        groups = [{**group, "rule": name} for name, rule in self.rules.items() for group in rule.param_groups]
        super().__init__(groups, {})

    def step(self, closure: Callable | None = None) -> float | None:
        """Update all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for name, rule in self.rules.items():
            # FSDP2 replaces the parameters, and a restored checkpoint the groups and the state
            rule.param_groups = [group for group in self.param_groups if group["rule"] == name]
            rule.state = self.state
            rule.step()
        return loss


class MuonInParts(Muon):  # type: ignore[misc, valid-type]  # the class that this torch has
    """torch's Muon, which takes the parts of a fused matrix as matrices of their own.

    A group has `parts`, the number of parts of its matrices, and `rows`, the number of consecutive rows of a part: the rows of a
    head for query, key and value, which alternate in NeoBERT. With FSDP2 each process gathers the matrices and computes all of
    them.
    """

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> float | None:
        """Update all parameters that have a gradient."""
        self._copies = []
        loss = super().step(closure)
        for whole, parts, rows in self._copies:
            updated = torch.stack([part.unflatten(0, (-1, rows)) for part in parts], 1).flatten(0, 2)
            if isinstance(whole, DTensor):  # every process has computed the same
                updated = distribute_tensor(updated, whole.device_mesh, whole.placements, src_data_rank=None)
            whole.copy_(updated)
        self._copies = []
        return loss

    # A private method: torch has no other place between the gradients and the orthogonalization.
    def _init_group(self, group, params_with_grad, grads, muon_momentum_bufs):
        wholes = ([], [], [])
        has_complex = super()._init_group(group, *wholes)
        for tensors, collected in zip(wholes, (params_with_grad, grads, muon_momentum_bufs)):
            for whole in tensors:
                gathered = whole.full_tensor() if isinstance(whole, DTensor) else whole
                if gathered is whole and group["parts"] == 1:
                    collected.append(whole)
                    continue
                rows = group["rows"] or len(gathered)
                parts = gathered.unflatten(0, (-1, group["parts"], rows)).unbind(1)
                copies = [part.flatten(0, 1).clone() for part in parts]
                collected += copies
                if tensors is not wholes[1]:  # gradients do not change
                    self._copies.append((whole, copies, rows))
        return has_complex


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model that have a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def names_with_decay(model: nn.Module, decay_norms_and_embeddings: bool) -> list[str]:
    """Return the names of the parameters with weight decay: all of them, or the matrices without embeddings."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        name
        for name, parameter in model.named_parameters()
        if decay_norms_and_embeddings or (parameter.ndim > 1 and id(parameter) not in embeddings)
    ]


def check_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if an optimizer leaves out a parameter that has a gradient; the message names it."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    forgotten = [name for name, parameter in parameters.items() if id(parameter) not in held]
    if forgotten:
        raise ValueError(
            f"the optimizer leaves out {first_of(forgotten)}; give it all parameters, or set requires_grad=False on those that "
            "stay as they are"
        )


def name_of(function: Callable) -> str:
    """Return module and name of a function or class, which identify it in `run.json`; of a `partial`, those of its function."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
