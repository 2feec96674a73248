"""One call: which truncation length does this model need on this data?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .._torch.preserve_model import preserve
from ..data.nest import Nest
from ..data.stream import SequenceStream, Stream
from ..estimate.bias import BiasCurve
from ..estimate.decay import DecayFit, fit_decay
from ..estimate.lag_profile import Array, LagProfile
from ..estimate.resampling import Interval, Uncertainty
from ..estimate.truncation import Outcome, TruncationDecision, check_tolerance, choose_truncation
from ..measure.lag_probe import probe_segment
from ..measure.sampling import alive_rows, check_reached, draw_segment
from ..model.losses import CountLosses, default_count
from ..model.recurrent import LossFn, Recurrent, as_recurrent
from ..truncate.gauges import Gauge, PaperGauge
from ..truncate.remedies import slow_part
from .stability_verdict import Stability, classify

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; print it, turn it into a dict, or draw it.

    Attributes:
        profile: the measured norms.
        bias: the bounds for every k, with the decay fit they rest on.
        decisions: one per delta, in the order asked for.
        uncertainty: intervals over resampled losses; None with a single sample.
        stability: which notion of decay the model satisfies.
        component_beta: decay rate of each part of the state.
        norms: `(lags, samples)`, what the gauge fitted where that is not the state's norms.
    """

    profile: LagProfile = field(repr=False)
    bias: BiasCurve
    decisions: tuple[TruncationDecision, ...]
    uncertainty: Uncertainty | None
    stability: Stability
    component_beta: dict[str, float]
    norms: Array | None = field(default=None, repr=False)

    @property
    def fitted(self) -> Array:
        """`(lags, samples)`: the norms whose decay was fitted."""
        return self.profile.measured if self.norms is None else self.norms

    @property
    def fit(self) -> DecayFit:
        """The fitted decay."""
        return self.bias.fit

    @property
    def notes(self) -> list[str]:
        """What a reader should know before trusting the table."""
        notes = []
        if self.profile.samples < 16:  # arbitrary: fewer give intervals too wide to use
            notes.append(f"only {self.profile.samples} losses were sampled; ask for more samples")
        if self.fit.tail == "underflow":
            notes.append(
                f"the gradient falls below the number format after lag {self.fit.last}; the decay "
                f"is fitted on lags {self.fit.tau} to {self.fit.last}"
            )
        if self.fit.tail == "zero":
            notes.append(f"the gradient is exactly zero from lag {self.fit.tau} on")
        for d in self.decisions:
            if d.outcome not in (Outcome.MET, Outcome.MET_AT_MINIMUM) and d.message not in notes:
                notes.append(d.message)
        slow = slow_part(self.profile, self.fit.beta)
        if slow is not None:
            notes.append(slow)
        if len(self.component_beta) > 1:
            slowest = max(self.component_beta, key=lambda name: self.component_beta[name])
            notes.append(
                f"slowest part of the state: {slowest}, beta={self.component_beta[slowest]:.4g}"
            )
        return notes

    def __str__(self) -> str:
        u = self.uncertainty
        head = (
            f"beta = {self.fit.beta:.4f}{_span(u.beta if u else None, '.4f')} "
            f"from lag {self.fit.tau} on; {self.profile.samples} losses, window "
            f"{self.profile.lags}, {'training' if self.profile.train else 'eval'} mode"
        )
        rows = [("delta", "K", f"{u.level:.0%}" if u else "", "bound", "outcome")]
        for d in self.decisions:
            interval = _span(u.k[d.delta] if u else None, ".0f")
            bound = f"{d.relative_bias:.3g}"
            rows.append((f"{d.delta:g}", f"{d.k}", interval, bound, d.outcome.value))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        table = [
            "  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[4]])
            for row in rows
        ]
        notes = [f"note: {text}" for text in self.notes]
        return "\n".join([head, *table, self.stability.verdict, *notes])

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, ready for JSON; infinite bounds become None."""
        intervals = self.uncertainty
        return {
            "beta": self.fit.beta,
            "beta_interval": intervals and list(intervals.beta),
            "tau": self.fit.tau,
            "lags": self.profile.lags,
            "samples": self.profile.samples,
            "train": self.profile.train,
            "mean": self.fitted.mean(axis=1).tolist(),
            "component_beta": dict(self.component_beta),
            "choices": [
                {
                    "delta": d.delta,
                    "k": d.k,
                    "k_interval": intervals and list(intervals.k[d.delta]),
                    "relative_bias": d.relative_bias if math.isfinite(d.relative_bias) else None,
                    "met": d.outcome.met,
                    "outcome": d.outcome.value,
                    "message": d.message,
                }
                for d in self.decisions
            ],
            "stability": self.stability.verdict,
            "jacobian_norm": self.stability.jacobian_norm,
            "notes": self.notes,
        }

    def figure(self, path: str | Path | None = None) -> Figure:
        """Draw the decay curve with the chosen K; save it where a path is given."""
        from .figures import decay_figure

        return decay_figure(self.profile, self.fit, self.decisions, path, norms=self.norms)


def diagnose(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    stream: Stream | tuple[Nest, Nest],
    deltas: float | Sequence[float] = (0.9, 0.5, 0.1),
    lags: int = 400,
    *,
    burn_in: int = 20,
    samples: int = 64,
    k_min: int = 1,
    k_max: int | None = None,
    gauge: Gauge | None = None,
    train: bool | None = None,
    level: float = 0.95,
    seed: int = 0,
    batch_first: bool | None = None,
    state_batch_dim: int | None = None,
    count_losses: CountLosses | None = None,
) -> Diagnosis:
    """Measure the decay on random segments and say which K each delta needs.

    Args:
        model: any recurrent module; see `adaptive_tbptt.model`.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch.
        stream: the data, or a pair `(inputs, targets)` laid out as the model takes it.
        deltas: tolerated relative biases.
        lags: number of lags to measure.
        burn_in: steps that warm the state up before the window; 20 as in the release.
        samples: at least so many losses are sampled, a whole batch at a time.
        k_min: smallest K to choose.
        k_max: largest K to choose; None is the window.
        gauge: how the relative bias is estimated; None is the printed paper's.
        train: mode of the model, as in `probe`.
        level: coverage of the intervals.
        seed: of the segments and the bootstrap.
        batch_first: layout of the model, as in `probe`.
        state_batch_dim: as in `probe`.
        count_losses: as in `AdaptiveTBPTT`, where targets are masked.

    >>> _ = torch.manual_seed(0)
    >>> data = torch.randn(200, 16, 3), torch.randn(200, 16, 8)
    >>> report = diagnose(nn.LSTM(3, 8), nn.functional.mse_loss, data, lags=60)
    >>> [choice.k < 10 for choice in report.decisions]
    [True, True, True]
    """
    recurrent = as_recurrent(model, batch_first=batch_first, state_batch_dim=state_batch_dim)
    if not isinstance(stream, Stream):
        stream = SequenceStream(*stream, batch_first=recurrent.batch_first)
    k_max = lags if k_max is None else k_max
    deltas = tuple(float(d) for d in np.atleast_1d(deltas))
    if not deltas:
        raise ValueError("deltas must name at least one tolerance, such as 0.1")
    if lags < 2:
        raise ValueError(f"lags must be at least 2 lags to see a decay, got {lags}")
    for delta in deltas:
        check_tolerance(delta, k_min, k_max)
    gauge = PaperGauge() if gauge is None else gauge
    generator = torch.Generator().manual_seed(seed)
    count_losses = default_count(loss_fn) if count_losses is None else count_losses
    profiles, alive = [], []
    with preserve(recurrent.module):
        for batch in range(math.ceil(samples / stream.rows)):
            segment = draw_segment(stream, burn_in + lags, count_losses, generator)
            torch.manual_seed(seed + batch)  # dropout of its own for every batch
            profiles.append(
                probe_segment(
                    recurrent,
                    loss_fn,
                    segment,
                    burn_in=burn_in,
                    train=train,
                    sketch=gauge.sketch,
                    count_losses=count_losses,
                )
            )
            alive.append(alive_rows(segment, count_losses, profiles[-1]))
    profile = LagProfile.concatenate(profiles)
    check_reached(profile, np.concatenate(alive))
    bias = gauge.bias(profile)
    uncertainty = None
    if profile.samples > 1:
        uncertainty = gauge.uncertainty(
            profile, deltas, k_min=k_min, k_max=k_max, level=level, seed=seed
        )
    return Diagnosis(
        profile=profile,
        bias=bias,
        decisions=tuple(choose_truncation(bias, delta=d, k_min=k_min, k_max=k_max) for d in deltas),
        uncertainty=uncertainty,
        stability=classify(recurrent, segment, bias.fit, burn_in=burn_in, seed=seed),
        component_beta=_component_beta(profile, gauge),
        norms=gauge.norms(profile) if gauge.sketch else None,
    )


def _component_beta(profile: LagProfile, gauge: Gauge) -> dict[str, float]:
    found = {}
    for name, norms in profile.component_norms.items():
        curve = np.nan_to_num(norms, nan=0.0).mean(axis=1)
        try:
            found[name] = fit_decay(curve, gauge.tau, gauge.method, floor=profile.floor).beta
        except ValueError:  # this part's gradient dies before the fit begins
            found[name] = 0.0
    return found


def _span(interval: Interval | None, form: str) -> str:
    return "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"
