"""From gradients, lag by lag, to the norms of a profile, in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .._torch.number_formats import autocast_format, wide
from ..data.nest import as_real, map_leaves
from ..estimate.decay import floor_of
from ..estimate.lag_profile import Array, LagProfile
from ..model.recurrent import Recurrent
from ..model.running import Step


class LagNorms:
    """Collect the norms of lags 0, 1, ... as their gradients arrive.

    Args:
        recurrent: the model.
        readout: gradient with respect to what the readout of the loss's step sees, or None.
        last: that step.
        window: number of lags to come.
        scale: the factor on the loss; the norms are divided by it.
    """

    def __init__(
        self,
        recurrent: Recurrent,
        readout: Tensor | None,
        last: Step,
        window: int,
        scale: float = 1.0,
    ) -> None:
        self._recurrent, self._template, self._scale = recurrent, last.entering, scale
        parts = recurrent.components(last.leaving)
        rows = next(iter(parts.values())).shape[0]
        # Allocate here everything that outlives a segment: small arrays between the large ones of
        # the segments would keep the allocator from reusing their memory.
        self._norms = {name: np.zeros((window + 1, rows)) for name in parts}
        self._means = {name: np.zeros((window + 1, part.shape[1])) for name, part in parts.items()}
        self._squares = {name: np.zeros(part.shape[1]) for name, part in parts.items()}
        self._window = window
        self._lag0 = np.full(rows, np.nan)
        self._floor, self._next = 0.0, 1
        if readout is None:
            for norms in self._norms.values():
                norms[0] = np.nan
            return
        norms, _ = _reduce(as_real(readout.detach()).reshape(1, rows, -1), scale)
        if not np.isfinite(norms).all():
            raise ValueError(
                "the gradient is NaN or infinite at lag 0, between the loss and the model"
            )
        self._lag0 = norms[0]
        seen = _seen_by_readout(last.features, parts)
        if seen is not None:
            self._norms[seen][0] = norms

    def add(self, gradients: list[Tensor]) -> None:
        """Take in the next lags: `(lags, *leaf)` for every leaf of the state."""
        remaining = iter(gradients)
        nest = map_leaves(lambda _: next(remaining), self._template)
        first, self._next = self._next, self._next + len(gradients[0])
        for name, part in self._recurrent.stacked_components(nest).items():
            norms, means = _reduce(part.detach(), self._scale)
            for lag in np.flatnonzero(~np.isfinite(norms).all(axis=1))[:1]:
                raise ValueError(
                    f"the gradient is NaN or infinite at lag {first + lag}: the recurrence "
                    "explodes; measure fewer lags, or use smaller weights"
                )
            if self._next > self._window:
                last = wide(part[-1].detach()) / self._scale
                self._squares[name] = last.square().mean(dim=0).cpu().numpy()
            self._norms[name][first : self._next] = norms
            self._means[name][first : self._next] = means
            # Gradients in float32 may have passed through the format of autocast.
            for form in (part.dtype, autocast_format(part.device) or part.dtype):
                self._floor = max(self._floor, floor_of(torch.finfo(form)) / self._scale)

    def profile(self, *, train: bool, burn_in: int) -> LagProfile:
        """Return the profile of all lags added."""
        whole = np.hypot.reduce([norms[1:] for norms in self._norms.values()])
        return LagProfile(
            state_norms=np.vstack([self._lag0, whole]),
            component_norms=self._norms,
            cumulative_gradient=np.cumsum(np.hstack(list(self._means.values())), axis=0),
            floor=self._floor,
            train=train,
            burn_in=burn_in,
            last_squares=self._squares,
        )


def _seen_by_readout(features: Tensor, components: dict[str, Tensor]) -> str | None:
    """Name the part of the state that the readout sees, such as the top layer's h, if any."""
    for name, part in reversed(components.items()):
        if features.numel() == part.numel() and torch.equal(
            features.reshape(part.shape).to(part.dtype), part
        ):
            return name
    return None


def _reduce(gradients: Tensor, factor: float) -> tuple[Array, Array]:
    """Return norms over dims and means over rows of `(lags, rows, dims)`, divided by `factor`.

    The square of a float64 may leave its range, so float64 gradients are scaled first.
    """
    values = wide(gradients)
    means = values.mean(dim=1)
    scale = values.new_ones(1)
    if gradients.dtype == torch.float64:
        scale = values.abs().amax(dim=-1, keepdim=True)
        scale = torch.where(scale == 0.0, 1.0, scale)
        values = values / scale
    norms = torch.linalg.vector_norm(values, dim=-1) * scale[..., 0]
    return (norms / factor).cpu().numpy(), (means / factor).cpu().numpy()
