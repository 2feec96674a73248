"""Is the promise kept? The relative bias at a given K, measured again by plain autograd.

Nothing here is shared with the gauges but the arithmetic of noisy means: the same losses are
backpropagated twice, once truncated as in training and once over the whole lags, and the two
gradients are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .._torch.compiling import eager
from .._torch.denormals import flushed_denormals
from .._torch.preserve_model import preserve
from ..data.nest import Nest, State, detach, map_leaves
from ..data.rows import join_rows
from ..data.segment import Segment
from ..data.stream import SequenceStream, Stream
from ..estimate.unbiased_norms import chance, groups_needed, quantile, squared_means
from ..loop.window_pass import window_forward
from ..measure.affine_uses import trained
from ..measure.lag_probe import refuse_batch_norm
from ..model.losses import CountLosses, default_count, refuse_sums
from ..model.pieces import advance, run
from ..model.recurrent import LossFn, Recurrent, as_recurrent

Verdict = Literal["kept", "broken", "not resolved"]


GROUPS = 16  # independent groups of segments: fewer would widen the interval, more cost memory


@dataclass(frozen=True)
class BiasCheck:
    """What the relative bias at k really is.

    Attributes:
        k: truncation length that was checked.
        losses: K2 of the gradient that was checked; 1 is Theorem 1's.
        relative: ||E g_K - E g|| / ||E g||; NaN where noise hides the gradient.
        low: lower limit.
        high: upper limit; infinite where noise hides the gradient.
        level: coverage of [low, high].
        samples: losses backpropagated.
        lags: lags of the gradient that it is compared with.
    """

    k: int
    losses: int
    relative: float
    low: float
    high: float
    level: float
    samples: int
    lags: int

    def verdict(self, delta: float) -> Verdict:
        """Say whether the relative bias is at most delta."""
        if self.high <= delta:
            return "kept"
        return "broken" if self.low > delta else "not resolved"

    def __str__(self) -> str:
        if not math.isfinite(self.high):
            return f"K={self.k}: noise hides the gradient of {self.samples} losses"
        return (
            f"K={self.k}: relative bias {self.relative:.3g} [{self.low:.3g}, {self.high:.3g}], "
            f"{self.samples} losses against {self.lags} lags"
        )


def check_bias(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    stream: SequenceStream | tuple[Nest, Nest],
    k: int | Sequence[int],
    *,
    losses: int = 1,
    lags: int = 100,
    steps: int = 20,
    segments: int = 32,
    burn_in: int = 20,
    level: float = 0.9,
    count_losses: CountLosses | None = None,
    seed: int = 0,
) -> list[BiasCheck]:
    """Measure the relative bias of truncating at k on random segments.

    Args:
        model: any recurrent module, at the parameters and in the mode to be checked.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch.
        stream: data; fresh data is what makes it a check.
        k: truncation length, or several.
        losses: K2, losses per window: 1 checks the gradient truncated at K that the theory speaks
            of, K that of the paper's training windows.
        lags: lags of the gradient to compare with; well above k. As long as the data, it is
            full backpropagation.
        steps: consecutive losses of every row of a segment, rounded up to whole windows.
        segments: random segments; more narrow the interval.
        burn_in: steps that warm up the state.
        level: coverage of the interval.
        count_losses: as in `AdaptiveTBPTT`.
        seed: of the segments.

    >>> _ = torch.manual_seed(0)
    >>> data = torch.randn(300, 8, 3), torch.randn(300, 8, 8)
    >>> (found,) = check_bias(nn.RNN(3, 8), nn.functional.mse_loss, data, 20, lags=60)
    >>> found.verdict(0.1)
    'kept'
    """
    recurrent = as_recurrent(model)
    refuse_sums(loss_fn)
    refuse_batch_norm(recurrent.module)
    if not isinstance(stream, Stream):
        stream = SequenceStream(*stream, batch_first=recurrent.batch_first)
    ks = [int(k)] if isinstance(k, Integral) else [int(one) for one in k]  # type: ignore[union-attr]
    for one in ks:
        if not 1 <= one < lags:
            raise ValueError(f"k must be in [1, {lags - 1}], below the lags, got {one}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level}")
    needed = groups_needed(level)
    if segments < needed:
        raise ValueError(
            f"it takes at least {needed} segments to tell a gradient from noise at level "
            f"{level:g}, got {segments}"
        )
    if losses < 1 or steps < 1:
        raise ValueError(f"losses and steps must be at least 1, got {losses} and {steps}")
    steps = math.ceil(steps / losses) * losses
    count_losses = default_count(loss_fn) if count_losses is None else count_losses
    groups = min(max(GROUPS, needed), segments)
    sums: NDArray[np.float32] | None = None
    generator = torch.Generator().manual_seed(seed)
    with (
        preserve(recurrent.module, backward=True),
        torch.enable_grad(),
        flushed_denormals(),
        eager(),
    ):
        for i in range(segments):
            segment = stream.random_segment(burn_in + lags + steps, generator)
            found = _gradients(recurrent, loss_fn, segment, ks, losses, lags, burn_in, count_losses)
            if sums is None:
                sums = np.zeros((len(found), groups, found.shape[1]), np.float32)
            sums[:, i % groups] += found
    assert sums is not None
    sizes = np.bincount(np.arange(segments) % groups)
    samples = segments * steps * stream.rows
    return [
        _compare(
            sums[0],
            sums[1 + i],
            sizes,
            k=one,
            losses=losses,
            level=level,
            samples=samples,
            lags=lags,
        )
        for i, one in enumerate(ks)
    ]


def _gradients(
    recurrent: Recurrent,
    loss_fn: LossFn,
    segment: Segment,
    ks: list[int],
    losses: int,
    lags: int,
    burn_in: int,
    count_losses: CountLosses,
) -> NDArray[np.float32]:
    """Return `(1 + len(ks), parameters)`: the whole gradient, and what truncation takes away."""
    parameters = list(trained(recurrent.module).values())

    def gradient(part: Segment, state: State, context: int) -> Tensor:
        loss = window_forward(recurrent, loss_fn, part, state, context, count_losses).loss
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([g.to_dense().reshape(-1) for g in found])

    segment = recurrent.place(segment)
    dims = recurrent.dims(segment.inputs)
    start = advance(recurrent, segment.between(0, burn_in), None) if burn_in else None
    if start is None:
        start = detach(recurrent.initial_state(segment.inputs))
    segment = segment.between(burn_in, segment.steps)
    entering = {0: start}
    with torch.no_grad():
        for piece in run(recurrent, segment, start, range(lags - max(ks), segment.steps)):
            entering[piece.stop] = detach(piece.state)
    whole = gradient(segment, start, lags)
    rows = [whole]
    for k in ks:
        # All windows side by side, as if they were rows of one batch.
        firsts = range(lags, segment.steps, losses)
        cuts = [segment.between(first - k, first + losses) for first in firsts]
        joined = Segment(*(_side_by_side(parts) for parts in zip(*cuts, strict=True)))
        states = join_rows([entering[first - k] for first in firsts], dims)
        rows.append(whole - gradient(joined, states, k))
    return torch.stack(rows).float().cpu().numpy()


def _side_by_side(parts: Sequence[Nest]) -> Nest:
    if parts[0] is None:
        return None
    return map_leaves(lambda *leaves: torch.cat(leaves, dim=1), *parts)


def _compare(
    whole: NDArray[np.float32],
    cut: NDArray[np.float32],
    sizes: NDArray[np.int64],
    *,
    k: int,
    losses: int,
    level: float,
    samples: int,
    lags: int,
) -> BiasCheck:
    """Return the ratio of two estimated norms, with Fieller's limits (1954).

    They are the ratios r for which |cut|^2 - r |whole|^2 may be zero. A ratio with an error of its
    own would be too sure where the whole is hardly told from noise: it is told only if luck made it
    large.
    """
    of_whole, of_cut = (squared_means(v, sizes, blocks=1) for v in (whole, cut))
    w, c = float(of_whole.value), float(of_cut.value)
    errors = np.cov(of_whole.without_group, of_cut.without_group, bias=True) * (len(sizes) - 1)
    (ww, wc), (_, cc) = errors * quantile((1 + level) / 2, len(sizes)) ** 2
    a, b = w**2 - ww, c * w - wc
    if chance(whole) > (1 - level) / 2 or w <= 0.0 or a <= 0.0:
        return BiasCheck(k, losses, math.nan, 0.0, math.inf, level, samples, lags)
    root = math.sqrt(max(b**2 - a * (c**2 - cc), 0.0))
    relative, low, high = (
        math.sqrt(max(value, 0.0)) for value in (c / w, (b - root) / a, (b + root) / a)
    )
    return BiasCheck(k, losses, relative, low, high, level, samples, lags)
