"""What all charts of the report share: Plotly figures as plain dicts, their style, their legend.

Legends are HTML outside the charts: Plotly's own legend covers the curves if it has many entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..diagnosis.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from ..train.files import short_number
from .curves import Curve
from .read import Run

Figure = dict[str, Any]
BIAS_AXIS = "relative bias (fraction)"  # of the norm of the gradient; phones cut longer titles
MARKED = 80  # arbitrary: curves with more points have no markers, which would hide the line
EDGE = {"color": "#000000", "width": 1}

# Seven colours, six dashes: the first 42 runs differ in the pair, the first six in each of them.
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, "#000000", SKY)
# Plotly's names for dashes and markers, with how SVG draws them in a legend: `stroke-dasharray`,
# and paths around (0, 0). The first six of each are those of runs.
DASHES = {
    "solid": "none",
    "dash": "8 5",
    "dot": "2 4",
    "dashdot": "8 4 2 4",
    "longdash": "14 4",
    "longdashdot": "14 4 2 4",
    "2px,4px": "2 4",
}
SYMBOLS = {
    "circle": "M-5,0A5,5 0 1 1 5,0A5,5 0 1 1 -5,0Z",
    "square": "M-4.5,-4.5H4.5V4.5H-4.5Z",
    "diamond": "M0,-6L6,0L0,6L-6,0Z",
    "triangle-up": "M0,-6L5.5,4H-5.5Z",
    "cross": "M-2,-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z",
    "x": "M-5,-3L-3,-5L0,-2L3,-5L5,-3L2,0L5,3L3,5L0,2L-3,5L-5,3L-2,0Z",
    "star": "M0,-6L1.6,-2L6,-1.8L2.6,1L3.8,5.2L0,2.8L-3.8,5.2L-2.6,1L-6,-1.8L-1.6,-2Z",
    "line-ns": "M0,-7V7",
}


@dataclass(frozen=True)
class Chart:
    """A chart with what it says in words.

    Attributes:
        id: its name in the page.
        title: its heading.
        figure: for Plotly; None if there is nothing to draw, and then `says` tells why.
        says: sentences, one for each run.
    """

    id: str
    title: str
    figure: Figure | None
    says: list[str]


def style(i: int) -> dict[str, Any]:
    """Return colour, dash and marker of the i-th run."""
    colour = COLOURS[i % len(COLOURS)]
    return {
        "line": {"color": colour, "dash": list(DASHES)[i % 6], "width": 2},
        "marker": {"color": colour, "symbol": list(SYMBOLS)[i % 6], "size": 6},
    }


def short(values: Iterable[float]) -> list[float | None]:
    """Return numbers in five digits, null for those that are not finite."""
    return [short_number(float(v)) for v in values]


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with its title."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **more}


def figure(traces: list[Figure], x: dict[str, Any], y: dict[str, Any]) -> Figure:
    """Return a figure in the style of the report."""
    margin = {"l": 60, "r": 12, "t": 12, "b": 50}
    layout = {"xaxis": x, "yaxis": y, "margin": margin, "showlegend": False}
    return {"data": traces, "layout": layout}


def trace(i: int, curve: Curve, name: str, **more: Any) -> Figure:
    """Return a curve of the i-th run; the page chooses epochs or time as x."""
    curve = curve.thinned()
    mode = "lines+markers" if len(curve.y) <= MARKED else "lines"
    meta = {"run": i, "epoch": short(curve.epoch), "time": short(curve.seconds)}
    made = {"type": "scatter", "mode": mode, "name": name, "y": short(curve.y), "meta": meta}
    return {**made, **style(i), **more}


def name_of(runs: Sequence[Run], run: Run, what: str) -> str:
    """Return the name of a curve in a legend, with its run if there are several."""
    return what if len(runs) == 1 else f"{run.name}: {what}"


def error_bars(run: Run) -> Figure:
    """Return the intervals of the checks of a run, as bars on either side."""
    low, middle, high = (run.checks.column(key) for key in ("low", "measured", "high"))
    bars = {"array": short(high - middle), "arrayminus": short(middle - low)}
    return {"type": "data", "symmetric": False, **bars}


def finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the values that are neither NaN nor infinite."""
    every = np.asarray(values, dtype=np.float64)
    return every[np.isfinite(every)]


def legend(figure: Figure) -> list[dict[str, Any]]:
    """Return the entries of a legend: names, with lines and markers as in the figure.

    `line` is colour, dashes and width, `marker` path, fill and edge; None where there is none.
    """
    entries: dict[str, dict[str, Any]] = {}
    for trace in figure["data"]:
        line = marker = None
        if "lines" in trace["mode"]:
            drawn = trace["line"]
            line = (drawn["color"], DASHES[drawn.get("dash", "solid")], drawn["width"])
        if "markers" in trace["mode"]:
            drawn = trace["marker"]
            symbol, colour = drawn["symbol"], drawn["color"]
            hollow = symbol.endswith("-open")
            edge = colour if hollow else drawn.get("line", {}).get("color", colour)
            path = SYMBOLS[symbol.removesuffix("-open")]
            marker = (path, "none" if hollow else colour, edge)
        entries.setdefault(trace["name"], {"name": trace["name"], "line": line, "marker": marker})
    return list(entries.values())
