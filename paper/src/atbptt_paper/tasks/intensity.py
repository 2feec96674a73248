"""The conditional intensity of Du et al. (2016): lambda(t_j + g) = exp(a + w g), a = v.h_j + b.

    Lambda(g) = integral of lambda from 0 to g = exp(a) (exp(w g) - 1) / w
    log f(g) = a + w g - Lambda(g)                                              (their Eq. 12)

Everything is right for w of any sign, at w = 0, and for gaps of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CAP = 30.0  # exp(30) is 1e13, beyond any honest Lambda; times 1e25 it still fits into float32


def time_nll(a: Tensor, w: Tensor, gap: Tensor) -> Tensor:
    """Return -log f(gap), elementwise."""
    return compensator(a, w, gap) - (a + w * gap)


def compensator(a: Tensor, w: Tensor, gap: Tensor) -> Tensor:
    """Return Lambda(gap) = gap * exp(a) * (exp(w gap) - 1) / (w gap)."""
    return gap * _capped_exp(a + _log_mean_exp(w * gap))


def _log_mean_exp(x: Tensor) -> Tensor:
    """log((exp(x) - 1) / x), the log of the mean of exp over [0, x].

    phi(x) = exp(x) phi(-x), so it is max(x, 0) + log phi(-|x|), whose argument lies in (0, 1].
    """
    small = x.abs() < 1e-2
    y = torch.where(small, torch.ones_like(x), x.abs())  # keeps the unused branch finite
    large = torch.clamp(x, min=0.0) + torch.log(-torch.expm1(-y) / y)
    # x/2 + x^2/24 - x^4/2880: the next term is below 1e-17 for |x| < 0.01.
    series = x / 2 + x**2 / 24 - x**4 / 2880
    return torch.where(small, series, large)


def _capped_exp(x: Tensor) -> Tensor:
    """exp(x), continued by its tangent above the cap, so that nothing overflows."""
    inside = torch.exp(torch.clamp(x, max=_CAP))
    return inside * (1.0 + torch.clamp(x - _CAP, min=0.0))


def expected_gap(a: Tensor, w: Tensor, *, nodes: int = 60) -> Tensor:
    """Return the expected gap to the next event, given that one comes.

    With w < 0 the intensity dies out and with probability exp(exp(a) / w) no event ever comes; the
    mean over the others is what is returned. The quantile function is known,

        g(u) = log(1 + w u / exp(a)) / w   where   Lambda(g) = u,

    so the mean is its integral over (0, 1), tail included, by tanh-sinh quadrature: relative error
    below 1e-8 for a in [-20, 20] and |w| up to 10 exp(a), in float64.

    Args:
        a: log intensity right after the last event, any shape.
        w: slope of the log intensity, broadcast against `a`.
        nodes: quadrature nodes on each side of the middle.
    """
    # On the CPU, since not every device has float64.
    a, w = torch.broadcast_tensors(a.cpu().double(), w.cpu().double())
    weights, left = _tanh_sinh(nodes)  # left = 1 - p, exact close to 0
    rate = torch.exp(a)[..., None]
    slope = (w / torch.exp(a))[..., None]
    # Probability that no event comes; 0 unless w < 0.
    never = torch.where(slope < 0, torch.exp(1.0 / torch.clamp(slope, max=-1e-300)), 0.0)
    u = -torch.log(never + left * (1.0 - never))
    x = slope * u
    tiny = x.abs() < 1e-8
    safe = torch.where(tiny, 1.0, x)
    grown = torch.log1p(torch.clamp(safe, min=-1.0 + 1e-16))
    # Where a dying intensity leaves little room, 1 + x cancels; it is |slope| log1p(rest) exactly.
    rest = left * (1.0 - never) / torch.clamp(never, min=1e-300)
    dying = (slope < 0) & (never > 1e-30)
    grown = torch.where(dying, torch.log(slope.abs() * torch.log1p(rest)), grown)
    gap = torch.where(tiny & ~dying, u / rate, u / rate * grown / safe)
    return (weights * gap).sum(dim=-1)


def _tanh_sinh(nodes: int) -> tuple[Tensor, Tensor]:
    """Weights on (0, 1) and the distance of each node from 1."""
    step = 4.0 / nodes
    t = step * torch.arange(-nodes, nodes + 1, dtype=torch.float64)
    arm = torch.pi / 2 * torch.sinh(t)
    left = 1.0 / (1.0 + torch.exp(2.0 * arm))
    weights = step * torch.pi / 4 * torch.cosh(t) / torch.cosh(arm) ** 2
    return weights / weights.sum(), left
