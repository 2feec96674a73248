"""The result of `lookback`, as a table, a dict or a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..estimate.history_curve import HistoryCurve
from .diagnosis_result import aligned
from .figures import draw_intervals, name_line, save, two_panels
from .palette import VERMILION

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History(NamedTuple):
    """Predictions after some steps of history, compared with those after the full history.

    Attributes:
        steps: inputs that the model reads, the present one included.
        change: E |y_h - y|^2 / Var y, the change of the predictions relative to their variance.
        low: lower limit.
        high: upper limit; infinite if too few end points leave it open.
        loss: mean loss.
        loss_low: lower limit, given the loss of the full history.
        loss_high: upper limit, given the loss of the full history.
    """

    steps: int
    change: float
    low: float
    high: float
    loss: float
    loss_low: float
    loss_high: float


@dataclass(frozen=True)
class Lookback:
    """The result of `lookback`; print it, turn it into a dict, or draw it.

    Attributes:
        steps: the shortest history that meets the tolerance: the shortest sequence length. None if
            no history that was tried does.
        interval: shortest history that may meet the tolerance, and shortest that surely does; None
            stands for one longer than all that were tried.
        loss_steps: the shortest history with both limits of the loss within `tolerance` of the full
            history's loss, as a share of it. None if no history that was tried has.
        rows: one per history tried, ascending.
        full_loss: mean loss after the full history.
        tolerance: the change that `steps` and `loss_steps` tolerate.
        window: steps of your longest window; None for a stream.
        end_points: number of predictions compared.
        level: coverage of the intervals.
        seconds: how long the measurement took.
        part: of several output tensors the one that changes most after `steps`; None if there is
            one.
    """

    steps: int | None
    interval: tuple[int | None, int | None]
    loss_steps: int | None
    rows: tuple[History, ...] = field(repr=False)
    full_loss: float
    tolerance: float
    window: int | None
    end_points: int
    level: float
    seconds: float
    part: str | None = None

    @staticmethod
    def of(
        curve: HistoryCurve, tolerance: float, *, window: int | None = None, seconds: float = 0.0
    ) -> Lookback:
        """Read the answer off a measured curve."""
        columns = (curve.change, curve.low, curve.high, curve.loss, curve.loss_low, curve.loss_high)
        values = zip(curve.lengths, *(column.tolist() for column in columns), strict=True)
        steps, interval = curve.shortest(tolerance)
        return Lookback(
            steps=steps,
            interval=interval,
            loss_steps=curve.shortest_for_loss(tolerance),
            rows=tuple(History(*row) for row in values),
            full_loss=curve.full_loss,
            tolerance=tolerance,
            window=window,
            end_points=curve.end_points,
            level=curve.level,
            seconds=seconds,
            part=dict(zip(curve.lengths, curve.largest, strict=False)).get(
                steps or curve.lengths[-1]
            ),
        )

    @property
    def burn_in(self) -> int | None:
        """Steps to run before the first prediction that counts: the warm-up of a cold start."""
        return None if self.steps is None else self.steps - 1

    @property
    def recommendation(self) -> str:
        """What to do, in a sentence."""
        row = next(row for row in self.rows if row.steps == (self.steps or self.rows[-1].steps))
        differ = (
            f"predictions differ from those after {self._full} by {_share(row.change)} of their "
            f"variance, and the loss is {row.loss:.4g} against {self.full_loss:.4g}"
        )
        if self.steps is None:
            more = "longer windows" if self.window else "a larger longest="
            return (
                f"No history up to {_steps(row.steps)} is enough: there {differ}. Try {more}, or "
                f"carry the state.{self._about}"
            )
        low, high = self.interval
        limits = f"[{low}, {f'above {self.rows[-1].steps}' if high is None else high}]"
        be = "is" if self.steps == 1 else "are"
        text = f"{_steps(self.steps)} {limits} of history {be} enough: {differ}."
        close = f"a loss within {100 * self.tolerance:g}% of that"
        if self.loss_steps is None:
            text += f" No history up to {_steps(self.rows[-1].steps)} gives {close}."
        elif self.loss_steps > self.steps:
            text += f" For {close} take {_steps(self.loss_steps)}."
        if self.window is None and self.burn_in:
            text += f" After a cold start, discard the first {self.burn_in} predictions."
        return text + self._about

    @property
    def _about(self) -> str:
        """Which of several outputs the answer is about."""
        if self.part is None:
            return ""
        return f" This is about '{self.part}', which changes most; predict= selects other outputs."

    @property
    def _full(self) -> str:
        return "the full history" if self.window is None else f"windows of {self.window} steps"

    def __str__(self) -> str:
        interval = f"{self.level:.0%} interval"
        table = [["history", "change", interval, "loss", interval, ""]]
        marks = {self.loss_steps: "enough for the loss", self.steps: "enough"}
        for row in self.rows:
            power = row.steps & (row.steps - 1) == 0
            if power or row.steps in marks or row is self.rows[-1]:
                high = _share(row.high) if math.isfinite(row.high) else "?"
                change = [_share(row.change), f"[{_share(row.low)}, {high}]"]
                loss = [f"{row.loss:.4g}", f"[{row.loss_low:.4g}, {row.loss_high:.4g}]"]
                table.append([str(row.steps), *change, *loss, marks.get(row.steps, "")])
        table.append(["full", "", "", f"{self.full_loss:.4g}", "", ""])
        title = (
            f"predictions after some steps of history, against those after {self._full}; change as "
            "a share of their variance"
        )
        return "\n".join([title, *aligned(table), self.recommendation])

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, ready for JSON; unknown numbers become None."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return {
            "steps": self.steps,
            "burn_in": self.burn_in,
            "interval": list(self.interval),
            "loss_steps": self.loss_steps,
            "rows": [{k: plain(v) for k, v in row._asdict().items()} for row in self.rows],
            "full_loss": plain(self.full_loss),
            "tolerance": self.tolerance,
            "window": self.window,
            "end_points": self.end_points,
            "level": self.level,
            "seconds": self.seconds,
            "part": self.part,
            "recommendation": self.recommendation,
        }

    def figure(self, path: str | Path | None = None) -> Figure:
        """Draw change and loss against the history; save the figure if you pass a path."""
        figure, left, right = two_panels()
        known = [row for row in self.rows if math.isfinite(row.high)]
        change = [[100 * getattr(row, name) for row in known] for name in ("change", "low", "high")]
        loss = [[row[i] for row in self.rows] for i in (4, 5, 6)]
        draw_intervals(left, [row.steps for row in known], *change)
        draw_intervals(right, [row.steps for row in self.rows], *loss)
        tolerance = 100 * self.tolerance
        left.set_yscale("symlog", linthresh=tolerance / 10)
        left.axhline(tolerance, color="0.4", ls="--", lw=1)
        right.axhline(self.full_loss, color="0.4", ls="--", lw=1)
        name_line(left, tolerance, f"tolerance {tolerance:g}%")
        name_line(right, self.full_loss, "full history")
        left.set_ylabel("change of the predictions (% of variance)")
        right.set_ylabel("loss")
        for axes, steps in ((left, self.steps), (right, self.loss_steps)):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("history (steps)")
            if steps is not None:
                axes.axvline(steps, color=VERMILION, lw=1.5)
                axes.set_title(f"enough: {_steps(steps)}", color=VERMILION, fontsize=10)
        left.set_ylim(0, None)
        title = f"Predictions after some history against those after {self._full}"
        return save(figure, f"{title}, {self.end_points} compared", path)


def _share(value: float) -> str:
    """Return a share in per cent, with one decimal."""
    return "<0.1%" if 0 < value < 0.001 else f"{value:.1%}"


def _steps(number: int) -> str:
    return f"{number} step" if number == 1 else f"{number} steps"
