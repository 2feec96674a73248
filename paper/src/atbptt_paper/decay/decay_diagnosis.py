"""The paper's diagnosis: the decay of the state's gradient, and the K that its bound asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from adaptive_tbptt import SequenceStream, choose_truncation, fit_decay
from adaptive_tbptt.data import Stream
from adaptive_tbptt.diagnosis import Sampling
from adaptive_tbptt.estimate import (
    BiasCurve,
    DecayFit,
    LagProfile,
    Limits,
    Outcome,
    TruncationDecision,
)
from adaptive_tbptt.measure import LagRequest
from adaptive_tbptt.model import CountLosses, LossFn, Objective, Recurrent
from adaptive_tbptt.truncate import PaperGauge, StateGauge

from .resampling import Interval, Uncertainty, bootstrap
from .stability_verdict import Stability, classify

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class DecayDiagnosis:
    """What `diagnose_decay` found; print it, turn it into a dict, or draw it.

    Attributes:
        profile: the measured norms.
        bias: the bounds for every k, with the decay fit they rest on.
        decisions: one per delta, in the order asked for.
        uncertainty: intervals over resampled losses; None with a single sample.
        stability: which notion of decay the model satisfies.
        component_beta: decay rate of each part of the state.
    """

    profile: LagProfile = field(repr=False)
    bias: BiasCurve
    decisions: tuple[TruncationDecision, ...]
    uncertainty: Uncertainty | None
    stability: Stability
    component_beta: dict[str, float]

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
        slow = self.profile.slow_part(self.fit.beta)
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
            f"from lag {self.fit.tau} on; {self.profile.samples} losses, "
            f"{self.profile.lags} lags, {'training' if self.profile.train else 'eval'} mode"
        )
        rows = [("delta", "K", f"{u.level:.0%}" if u else "", "bound", "outcome")]
        for d in self.decisions:
            assert d.delta is not None
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
            "mean": self.profile.mean.tolist(),
            "component_beta": dict(self.component_beta),
            "choices": [
                {
                    "delta": d.delta,
                    "k": d.k,
                    "k_interval": intervals and list(intervals.k[d.delta or 0.0]),
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
        from .decay_figure import decay_figure

        return decay_figure(self.profile, self.fit, self.decisions, path)


def diagnose_decay(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    data: Stream | tuple[Any, Any],
    deltas: float | Sequence[float] = (0.9, 0.5, 0.1),
    *,
    lags: int = 100,
    k_range: tuple[int, int | None] = (1, None),
    gauge: StateGauge | None = None,
    sampling: Sampling | None = None,
    count_losses: CountLosses | None = None,
) -> DecayDiagnosis:
    """Measure the decay on random segments and say which K the paper's bound asks for.

    This is what the paper looks at: norms of the state's gradient, and a bound from them that
    guarantees nothing. `adaptive_tbptt.diagnose` measures the bias itself.

    Args:
        model: any recurrent module; see `adaptive_tbptt.model.Recurrent`.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch.
        data: a stream, or a pair `(inputs, targets)` laid out as the model takes it.
        deltas: tolerated relative biases.
        lags: number of lags to measure.
        k_range: smallest and largest K to choose; None is the number of lags.
        gauge: how the relative bias is bounded; None is the printed paper's.
        sampling: how many losses, in which mode, from which seed.
        count_losses: as in `AdaptiveTBPTT`, where targets are masked.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> data = torch.randn(200, 16, 3), torch.randn(200, 16, 8)
    >>> report = diagnose_decay(nn.LSTM(3, 8), nn.functional.mse_loss, data, lags=60)
    >>> [choice.k < 10 for choice in report.decisions]
    [True, True, True]
    """
    objective = Objective.of(model, loss_fn, count_losses)
    stream = data
    if not isinstance(stream, Stream):
        stream = SequenceStream(*stream, batch_first=objective.recurrent.batch_first)
    how = sampling or Sampling()
    k_min, k_max = k_range[0], lags if k_range[1] is None else k_range[1]
    tolerances = tuple(float(d) for d in np.atleast_1d(deltas))
    if not tolerances:
        raise ValueError("deltas must name at least one tolerance, such as 0.1")
    if lags < 2:
        raise ValueError(f"lags must be at least 2 to see a decay, got {lags}")
    for delta in tolerances:
        Limits(delta, k_min, k_max)
    gauge = PaperGauge() if gauge is None else gauge
    source = how.source(objective, stream)
    request = LagRequest(lags, batches=math.ceil(how.samples / stream.rows))
    profile = request.measure(source)
    bias = gauge.bias(profile)
    uncertainty = None
    if profile.samples > 1:
        uncertainty = bootstrap(
            profile.measured,
            bias.fit,
            deltas=tolerances,
            k_min=k_min,
            k_max=k_max,
            gradient_norms=gauge.gradient_norms(profile),
            level=how.level,
            seed=how.seed,
        )
    # One more draw: stability is observed along a segment like those that were probed.
    segment = source.draw(lags)
    return DecayDiagnosis(
        profile=profile,
        bias=bias,
        decisions=tuple(
            choose_truncation(bias, delta=d, k_min=k_min, k_max=k_max) for d in tolerances
        ),
        uncertainty=uncertainty,
        stability=classify(
            objective.recurrent, segment, bias.fit, burn_in=how.burn_in, seed=how.seed
        ),
        component_beta=_component_beta(profile, gauge),
    )


def _component_beta(profile: LagProfile, gauge: StateGauge) -> dict[str, float]:
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
