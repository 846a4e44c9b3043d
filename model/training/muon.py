"""Muon (Jordan et al. 2024) for the matrices of the blocks, and fused AdamW for embeddings and vectors, as
one optimiser.

torch.optim.Muon has the same update, and neither AdamW beside it nor a way to clip, or to skip a gradient
that is not finite, without the host: so its few lines are written out here, for all matrices of a shape at
once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)  # of Newton-Schulz, as published
EPS = 1e-7


def orthogonalised(update: Tensor) -> Tensor:
    """Of matrices (n, r, c) the nearest with orthogonal rows or columns, about: singular values of 0.7 to
    1.2, by five steps of a quintic Newton-Schulz iteration in bf16."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16()
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MuonAdamW(torch.optim.AdamW):
    """Groups with `muon=True` are matrices that Muon updates; all others are AdamW's.

    Both share the learning rate and weight decay: an update of Muon is scaled to the size of AdamW's, 0.2
    sqrt(max(r, c)) (Moonshot 2025). `grad_scale` and `found_inf`, set by the caller, mean what they mean to
    the fused AdamW: gradients are divided by the one, and nothing changes where the other is 1.

    momentum: of Muon, with Nesterov's step."""

    splits_hidden = True  # its groups need matrices of blocks apart from embeddings
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Any, momentum: float = 0.95, **adamw: Any):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: it needs to be from 0 to below 1")
        if adamw.get("maximize"):
            raise ValueError("maximize=True: Muon minimises; leave it out")
        super().__init__(params, **adamw)
        for group in self.param_groups:
            group["momentum"] = momentum
            group.setdefault("muon", False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Without Adam's, which brings states of older versions up to date and asks each for its step."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._orthogonal(group)
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def _orthogonal(self, group: dict[str, Any]) -> None:
        shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                shapes[parameter.shape].append(parameter)
        lr, momentum = group["lr"], group["momentum"]
        for (rows, columns), parameters in shapes.items():
            states = [self.state[parameter] for parameter in parameters]
            for state, parameter in zip(states, parameters, strict=True):
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
            grad = torch.stack([parameter.grad for parameter in parameters])  # (n, r, c)
            if self.grad_scale is not None:
                grad = grad / self.grad_scale
            mean = torch.stack([state["momentum_buffer"] for state in states]).lerp_(grad, 1 - momentum)
            update = orthogonalised(grad.lerp_(mean, momentum)) * (0.2 * math.sqrt(max(rows, columns)))
            # on the device and in fp32, as a captured step has it: a number would be rounded otherwise
            rate = lr if isinstance(lr, Tensor) else torch.full((), lr, device=grad.device)
            kept = 1 - rate * group["weight_decay"]
            for i, (state, parameter) in enumerate(zip(states, parameters, strict=True)):
                after = parameter * kept - rate * update[i].float()
                self._unless_skipped(parameter, after)
                self._unless_skipped(state["momentum_buffer"], mean[i])

    def _unless_skipped(self, tensor: Tensor, after: Tensor) -> None:
        skip = self.found_inf
        tensor.copy_(after if skip is None else torch.where(skip > 0, tensor, after))
