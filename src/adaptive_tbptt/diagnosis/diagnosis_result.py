"""The result of `diagnose`, as a table, a dict or a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..estimate.level_bias import LevelCurve
from .figures import draw_intervals, save, two_panels
from .window_memory import WindowMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Row(NamedTuple):
    """The bias and the cost of a loop with some context.

    Attributes:
        losses: steps of a window that carry a loss.
        context: steps before them that the gradient also flows through; 0 is the detach loop.
        bias: relative bias of the gradient; NaN if noise hides it.
        low: lower limit.
        high: upper limit.
        cost: time of a forward and backward pass, relative to the loop without context.
        bound: the paper's bound on the bias of a single loss; None unless `bound=True`.
    """

    losses: int
    context: int
    bias: float
    low: float
    high: float
    cost: float
    bound: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`; print it, turn it into a dict, or draw it.

    Attributes:
        rows: one per context; the first is your loop as it is.
        recommendation: what to do, in a sentence.
        curve: the measured bias behind the rows.
        delta: the bias that the recommendation tolerates.
        notes: what to know before you trust the table.
        seconds: how long the measurement took.
        memory: what windows hold for their backward pass.
    """

    rows: tuple[Row, ...]
    recommendation: str
    curve: LevelCurve = field(repr=False)
    delta: float
    notes: tuple[str, ...]
    seconds: float
    memory: WindowMemory = field(repr=False)

    def __str__(self) -> str:
        bounds = any(row.bound is not None for row in self.rows)
        table = [["context", "misses", f"{self.curve.level:.0%} interval", "cost"]]
        table[0] += ["paper's bound", ""] if bounds else [""]
        for row in self.rows:
            shares = ["?", "not resolved"]
            if math.isfinite(row.high):
                shares = [f"{row.bias:.1%}", f"[{row.low:.1%}, {row.high:.1%}]"]
            bound = ["" if row.bound is None else f"{row.bound:.3g}"] if bounds else []
            last = "your loop as it is" if row.context == 0 else ""
            table.append([str(row.context), *shares, f"{row.cost:.2f} x", *bound, last])
        title = (
            f"windows of {self.curve.losses} losses; share of the gradient that is missed, against "
            f"{self.curve.lags} steps of context"
        )
        notes = [f"note: {text}" for text in self.notes]
        return "\n".join([title, *aligned(table), self.recommendation, *notes])

    def longest_window(self, gigabytes: float, recompute: int | None = None) -> int:
        """Return the most steps of a window, its context included, that fit into memory.

        The forecast counts what the window holds for its backward pass (`memory`). Parameters,
        gradients, optimiser and data come on top. If not even the losses fit, the answer is smaller
        than their number.

        Args:
            gigabytes: 10^9 bytes each.
            recompute: as in `AdaptiveTBPTT`; None holds the whole window.
        """
        return self.memory.longest(gigabytes, recompute)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, ready for JSON; unknown numbers become None."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return {
            "rows": [{k: plain(v) for k, v in row._asdict().items()} for row in self.rows],
            "recommendation": self.recommendation,
            "losses": self.curve.losses,
            "lags": self.curve.lags,
            "samples": self.curve.samples,
            "level": self.curve.level,
            "tail": plain(self.curve.tail),
            "seconds": self.seconds,
            "notes": list(self.notes),
            "memory": asdict(self.memory),
        }

    def figure(self, path: str | Path | None = None) -> Figure:
        """Draw bias against context and against cost; save the figure if you pass a path."""
        figure, left, right = two_panels(sharey=True)
        known = [row for row in self.rows if math.isfinite(row.high)]
        bias, low, high = (
            [100 * getattr(row, name) for row in known] for name in ("bias", "low", "high")
        )
        draw_intervals(left, [row.context for row in known], bias, low, high)
        draw_intervals(right, [row.cost for row in known], bias, low, high)
        right.margins(x=0.12)
        left.set_xscale("symlog", base=2, linthresh=1)
        left.set_xlim(-0.2, None)
        left.set_xticks([row.context for row in known], [str(row.context) for row in known])
        left.minorticks_off()
        left.set_ylim(0, None)
        left.set_xlabel("context (steps)")
        left.set_ylabel("gradient missed (%)")
        right.set_xlabel("cost of a window (detach loop = 1)")
        for row in known:
            if row.context == 0 or row.context >= 8:  # labels of shorter ones would overlap
                right.annotate(
                    "your loop" if row.context == 0 else str(row.context),
                    (row.cost, 100 * row.bias),
                    xytext=(5, 4),
                    textcoords="offset points",
                    fontsize=8,
                )
        title = f"Windows of {self.curve.losses} losses; {self.curve.samples} losses measured"
        if known and known[0].context == 0:
            title += f": without context {known[0].bias:.0%} of the gradient is missed"
        return save(figure, title, path)


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row of cells: columns flush right, the last one flush left."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    return [
        "  ".join([*(row[i].rjust(width) for i, width in enumerate(widths)), row[-1]]).rstrip()
        for row in table
    ]
