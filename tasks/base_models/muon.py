"""The optimizer Muon in fp32: momentum, orthogonalized before it is applied.

    m ← μ m + (1 − μ) g
    u = (1 − μ) g + μ m
    W ← (1 − lr·λ) W − lr·sqrt(max(1, rows/columns)) · orth(u)

Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), the same
update as `torch.optim.Muon` with `adjust_lr_fn="original"`. That implementation multiplies in bf16,
which is slow on most CPUs and ends with SIGILL on some virtual ones, and it orthogonalizes one
matrix at a time; here all matrices of one shape are orthogonalized together.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
EPS = 1e-7


def orthogonalized(matrices: Tensor) -> Tensor:
    """Approximate U Vᵀ of matrices U S Vᵀ [N, R, C], R ≤ C; singular values become 0.7 to 1.2.

    Five iterations of the quintic Newton–Schulz X ← a X + (b X Xᵀ + c (X Xᵀ)²) X from X = M / ‖M‖.
    """
    if matrices.ndim != 3 or matrices.shape[1] > matrices.shape[2]:
        raise ValueError(f"expected matrices [N, R, C] with R <= C, got {tuple(matrices.shape)}")
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Optimizer of the matrices of hidden layers; AdamW is for embeddings, norms and heads."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon updates matrices only")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure, hence no loss to return
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    update = self._momentum(p, p.grad, group["momentum"])
                    rows, columns = p.shape
                    by_shape[min(rows, columns), max(rows, columns)].append(
                        (p, update if rows <= columns else update.mT)
                    )
            for matrices in by_shape.values():
                updates = orthogonalized(torch.stack([update for _, update in matrices]))
                for (p, _), update in zip(matrices, updates, strict=True):
                    rows, columns = p.shape
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    lr = group["lr"] * max(1.0, rows / columns) ** 0.5
                    p.add_(update if rows <= columns else update.mT, alpha=-lr)

    def _momentum(self, p: Tensor, gradient: Tensor, momentum: float) -> Tensor:
        """Update the momentum of a parameter with its gradient; return the Nesterov momentum."""
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(gradient, 1 - momentum)
        return torch.lerp(gradient, state["momentum"], momentum)
