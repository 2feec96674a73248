"""The gradient norms of one batch of losses, lag by lag, as the probe measures them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decay import resolve

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LagProfile:
    """phi_k = ||dL_s / dh_{s-k}|| for k = 0..lags, one column per sampled loss.

    Lag 0 is the gradient with respect to what the readout of step s sees, lag k >= 1 that with
    respect to the whole state that enters step s-k+1.

    Attributes:
        state_norms: `(lags + 1, samples)`; row 0 is NaN if the model does not expose lag 0.
        component_norms: the same for each part of the state (layer by layer, h and c apart).
        cumulative_gradient: `(lags + 1, dims)`, E_s sum_{1<=j<=k} dL_s/dh_{s-j}. As in the
            authors' release it starts at lag 1, the state that enters the step of the loss.
        floor: the smallest norm that the number format of the gradients resolves.
        train: whether the model was in training mode.
        burn_in: steps that warmed the state up before the first lag.
        last_squares: for each part of the state `(dims,)`, the mean square of each entry of the
            gradient at the last lag; it shows where the gradient survives.
    """

    state_norms: Array
    component_norms: dict[str, Array] = field(repr=False)
    cumulative_gradient: Array = field(repr=False)
    floor: float = 0.0
    train: bool = False
    burn_in: int = 0
    last_squares: dict[str, Array] = field(default_factory=dict, repr=False)

    @property
    def lags(self) -> int:
        """Number of lags measured (R in Algorithm 1, W in the experiments)."""
        return self.state_norms.shape[0] - 1

    @property
    def samples(self) -> int:
        """Number of losses sampled."""
        return self.state_norms.shape[1]

    @property
    def measured(self) -> Array:
        """`state_norms`, with 0 for a lag 0 that is not exposed; this can only enlarge k."""
        return np.nan_to_num(self.state_norms, nan=0.0)

    @property
    def mean(self) -> Array:
        """`(lags + 1,)`: E phi_k over the samples (Eq. empirical_expectation)."""
        return self.measured.mean(axis=1)

    @property
    def cumulative_norms(self) -> Array:
        """`(lags + 1,)`: norms of `cumulative_gradient`; the authors' release divides by them."""
        # hypot, because the squares of a tiny or huge gradient leave the range of float64.
        return np.hypot.reduce(self.cumulative_gradient, axis=1)

    @property
    def underflowed(self) -> NDArray[np.bool_]:
        """`(lags + 1,)`: lags past the last one above the floor of the number format."""
        last, tail = resolve(self.mean, self.floor)
        return (np.arange(self.lags + 1) > last) & (tail == "underflow")

    def brief(self, most: int = 101) -> dict[str, list[Any]]:
        """Return means in four digits at up to `most` evenly spaced lags, for a log.

        A lag that was not measured or not resolved is None.
        """
        mean, ends = self.mean, self.lags
        lags = np.unique(np.linspace(0, ends, min(most, ends + 1)).round().astype(int)).tolist()
        seen = (mean > 0.0) & np.isfinite(mean) & ~self.underflowed
        return {"lags": lags, "phi": [float(f"{mean[k]:.4g}") if seen[k] else None for k in lags]}

    def slow_part(self, beta: float) -> str | None:
        """Say where the gradient survives, if it falls by less than a factor of e over the lags."""
        if beta < math.exp(-1.0 / self.lags) or not self.last_squares:
            return None
        shares = {name: float(squares.sum()) for name, squares in self.last_squares.items()}
        total = sum(shares.values())
        if not total > 0.0:
            return None
        name = max(shares, key=lambda part: shares[part])
        squares = np.sort(self.last_squares[name])[::-1]
        few = int(np.searchsorted(np.cumsum(squares), 0.9 * squares.sum()) + 1)
        return (
            f"the gradient hardly decays over {self.lags} lags (beta={beta:.4g}): "
            f"{shares[name] / total:.0%} of the squared gradient left is in {name}, nine tenths of "
            f"that in {few} of its {len(squares)} dimensions"
        )

    def scaled(self, factor: float) -> LagProfile:
        """Return the profile of the loss multiplied by `factor`."""
        return replace(
            self,
            state_norms=self.state_norms * factor,
            component_norms={name: n * factor for name, n in self.component_norms.items()},
            cumulative_gradient=self.cumulative_gradient * factor,
            floor=self.floor * abs(factor),
            last_squares={name: s * factor**2 for name, s in self.last_squares.items()},
        )

    def silent(self, samples: int) -> LagProfile:
        """Return a profile of the same shape for `samples` rows without a loss: all zeros."""
        nothing = np.zeros((self.lags + 1, samples))
        return replace(
            self,
            state_norms=nothing,
            component_norms=dict.fromkeys(self.component_norms, nothing),
            cumulative_gradient=np.zeros_like(self.cumulative_gradient),
            last_squares={name: np.zeros_like(s) for name, s in self.last_squares.items()},
        )

    @staticmethod
    def concatenate(profiles: Sequence[LagProfile]) -> LagProfile:
        """Join profiles of the same model at the same parameters into one with more samples."""
        if not profiles:
            raise ValueError("expected at least one profile")
        first = profiles[0]
        if any(p.lags != first.lags for p in profiles):
            raise ValueError("profiles to join must have the same lags")
        weights = np.array([p.samples for p in profiles], dtype=np.float64)

        def average(values: Sequence[Array]) -> Array:
            return np.average(values, axis=0, weights=weights)

        return LagProfile(
            state_norms=np.concatenate([p.state_norms for p in profiles], axis=1),
            component_norms={
                name: np.concatenate([p.component_norms[name] for p in profiles], axis=1)
                for name in first.component_norms
            },
            cumulative_gradient=average([p.cumulative_gradient for p in profiles]),
            floor=max(p.floor for p in profiles),
            train=first.train,
            burn_in=first.burn_in,
            last_squares={
                name: average([p.last_squares[name] for p in profiles])
                for name in first.last_squares
            },
        )
