"""Fit the geometric decay E phi_{k+1} <= beta E phi_k, k >= tau, of Assumption (A-1).

Pure functions of arrays. The printed estimators read `beta = log[...]`. They mean log beta = slope,
so we compute beta = exp(slope).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Method = Literal["ols", "max", "quantile"]
Tail = Literal["measured", "underflow", "zero"]
QUANTILE = 0.9  # of the slopes, for method 'quantile'; arbitrary


@dataclass(frozen=True)
class DecayFit:
    """The decay rate and the lags it was fitted on.

    Attributes:
        beta: decay per lag; 0 if the gradient is exactly zero from `tau` on.
        log_beta: its logarithm, the fitted slope.
        tau: first lag of the fit.
        last: last lag of the fit: the last measured, or the last that the number format resolves.
        lags: number of lags used.
        stderr: standard error of the least-squares slope (NaN with two lags, or other methods).
        method: 'ols', 'max' or 'quantile'.
        tail: what lies beyond `last`: nothing ('measured'), underflow, or true zeros.
    """

    beta: float
    log_beta: float
    tau: int
    last: int
    lags: int
    stderr: float
    method: Method = "ols"
    tail: Tail = "measured"

    @property
    def decays(self) -> bool:
        """Whether beta < 1; otherwise there is no bound."""
        return self.beta < 1.0

    @property
    def rate(self) -> str:
        """Beta with enough digits to show on which side of 1 it lies."""
        apart = abs(1.0 - self.beta)
        digits = 1 - math.floor(math.log10(apart)) if 0.0 < apart < 1e-3 else 4
        return f"{self.beta:.{digits}g}"


def fit_decay(
    phi: ArrayLike,
    tau: int | float = 0.9,
    method: Method = "ols",
    *,
    floor: float | None = None,
) -> DecayFit:
    """Fit log E phi_k = const + k log beta on the lags [tau, end].

    Args:
        phi: `(lags,)` norms, or `(lags, samples)`; row k is lag k.
        tau: an int is a lag, a float a fraction of the lags.
        method: 'ols' is the least-squares slope (Eq. ols_estimate_beta), 'max' the largest slope
            between two lags (Eq. max_estimate_beta), 'quantile' the 0.9 quantile of those slopes.
        floor: norms below it are underflow, not measurements. None looks for the floor of float32
            or float64 at the end of the curve.

    Returns:
        The fit. It leaves out lags that underflowed: tau slides to the same fraction of the last
        resolved lag, and `tail` is 'underflow'. Exact zeros after values far above the floor are
        true zeros; beta is 0 if they fill at least half of the lags to be fitted.

    Choosing tau: it must lie past the lags where the curve still bends. The paper uses 0.9 of the
    measured lags and saw little change once it was large enough; the release uses 0.8 for the copy
    task.

    Choosing a method: 'ols' averages the noise out and is the paper's choice in practice. 'max' is
    more cautious: the single worst pair of lags decides.

    >>> fit = fit_decay(0.8 ** np.arange(101))
    >>> round(fit.beta, 12), fit.tau, fit.lags
    (0.8, 90, 11)
    """
    curve = _curve(phi)
    end = len(curve) - 1
    _check_options(tau, end, method)
    last, tail = resolve(curve, floor)
    asked = _first_lag(tau, end)
    if tail == "zero" and 2 * (end - last) > end - asked:
        # Zeros fill at least half of the lags to be fitted; a stray zero at the end is ignored.
        start, last, slope, stderr = max(asked, last + 1), end, -math.inf, math.nan
        lags = np.arange(start, end + 1)
    else:
        tail = "measured" if tail == "zero" else tail
        # Underflow took the last lags: tau keeps its fraction of those left, unless it was given as
        # a lag that is still among them.
        kept = isinstance(tau, Integral) and tau < last
        start = asked if kept or last == end else _first_lag(asked / end, last)
        lags = fitted_lags(curve, min(start, last - 1), last)
        log_phi = np.log(curve[lags])
        start = int(lags[0])
        slope = float(slopes(lags, log_phi[:, None], method)[0])
        stderr = _stderr(lags, log_phi, slope) if method == "ols" else math.nan
    return DecayFit(
        beta=math.exp(min(slope, 700.0)),  # exp(700) is about the largest that float64 holds
        log_beta=slope,
        tau=start,
        last=last,
        lags=len(lags),
        stderr=stderr,
        method=method,
        tail=tail,
    )


def fitted_lags(curve: Array, start: int, last: int) -> NDArray[np.int64]:
    """Return the lags from `start` to `last` with a positive norm: zero has no logarithm."""
    start = max(start, 0)
    lags = start + np.flatnonzero(curve[start : last + 1] > 0.0)
    if len(lags) < 2:
        raise ValueError(
            "a decay needs at least two norms above zero and above the floor of the number "
            f"format; from lag {start} on there are {len(lags)}. Measure more lags, or lower tau"
        )
    return lags


def slopes(lags: NDArray[np.int64], log_phi: Array, method: Method) -> Array:
    """Return the slope of each column of `log_phi` `(lags, curves)` by the given method."""
    if method == "ols":
        # The weighted mean of pair slopes with weights (k - k')^2 is the regression slope.
        centred = lags - lags.mean()
        return np.asarray(centred @ log_phi / (centred @ centred))
    if method == "max":
        # A slope between distant lags is a mean of the slopes in between, so the largest of all
        # slopes lies between neighbours.
        steps = np.diff(log_phi, axis=0) / np.diff(lags)[:, None]
        return np.asarray(steps.max(axis=0))
    i, j = np.triu_indices(len(lags), k=1)
    steps = (log_phi[j] - log_phi[i]) / (lags[j] - lags[i])[:, None]
    return np.asarray(np.quantile(steps, QUANTILE, axis=0))


def resolve(curve: Array, floor: float | None = None) -> tuple[int, Tail]:
    """Return the last lag above the floor of the number format, and what lies beyond it.

    A curve that decays down to the floor and ends in denormals or zeros has underflowed. A curve
    that drops to exact zero from far above the floor is truly zero (the nilpotent RNN).
    """
    positive = curve[curve > 0.0]
    if positive.size == 0:
        return -1, "zero"
    smallest = float(positive.min())
    lowest = floor_of(_FORMATS[0]) if floor is None else floor
    above = np.flatnonzero(curve > (_guess_floor(smallest) if floor is None else floor))
    last = int(above[-1]) if above.size else -1
    if last == len(curve) - 1:
        return last, "measured"
    # An arbitrary margin of 10^6: a decay that ends this close to the floor ends because of it.
    return last, "zero" if smallest > 1e6 * lowest else "underflow"


def floor_of(form: Any) -> float:
    """Return the smallest norm that a number format (numpy's or torch's finfo) resolves.

    Below tiny / eps an entry that still matters to the norm may itself be denormal. float16 has no
    range to spare for that margin.
    """
    tiny, eps = float(form.tiny), float(form.eps)
    return tiny / eps if form.bits > 16 or tiny < 1e-30 else tiny


_FORMATS: list[Any] = [np.finfo(np.float32), np.finfo(np.float64)]


def _guess_floor(smallest: float) -> float:
    """Return the floor of the format in whose denormal range the curve ends; 0 if it is in none."""
    for form in _FORMATS:
        # A mean of many samples may lie below every number of their format.
        if float(form.smallest_subnormal) / 1e6 <= smallest < float(form.tiny):
            return floor_of(form)
    return 0.0


def _curve(phi: ArrayLike) -> Array:
    values = np.asarray(phi, dtype=np.float64)
    if values.ndim not in (1, 2) or values.shape[0] < 2:
        raise ValueError(
            f"phi must be (lags,) or (lags, samples) with at least two lags, got {values.shape}"
        )
    if np.isnan(values[0]).all():  # the model does not expose lag 0: it counts as 0
        values = values.copy()
        values[0] = 0.0
    bad = ~np.isfinite(values) | (values < 0.0)
    if bad.any():
        lag = int(np.argwhere(bad)[0][0])
        raise ValueError(f"phi must be finite and not negative; it is not at lag {lag}")
    return values if values.ndim == 1 else np.asarray(values.mean(axis=1))


def _first_lag(tau: int | float, end: int) -> int:
    # 1e-9 so that 0.9 * 10 is lag 9 whatever the rounding.
    return int(tau) if isinstance(tau, Integral) else math.floor(tau * end + 1e-9)


def _stderr(lags: NDArray[np.int64], log_phi: Array, slope: float) -> float:
    if len(lags) < 3:
        return math.nan
    centred = lags - lags.mean()
    residual = log_phi - log_phi.mean() - slope * centred
    return math.sqrt(float(residual @ residual) / (len(lags) - 2) / float(centred @ centred))


def _check_options(tau: int | float, end: int, method: str) -> None:
    allowed = ("ols", "max", "quantile")
    if method not in allowed:
        raise ValueError(f"method must be one of {', '.join(allowed)}; got {method!r}")
    if isinstance(tau, bool) or not isinstance(tau, Real):
        raise TypeError(f"tau must be an int (a lag) or a float (a fraction), got {tau!r}")
    if isinstance(tau, Integral) and not 0 <= tau < end:
        raise ValueError(f"tau must be a lag in [0, {end - 1}] for {end} lags, got {tau}")
    if not isinstance(tau, Integral) and not 0.0 <= tau < 1.0:
        raise ValueError(
            f"tau must be a fraction in [0, 1) of the lags, got {tau}; pass a lag as an int"
        )
