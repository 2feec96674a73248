"""Legends in HTML, outside the charts: Plotly's own covers the curves where it has many entries."""

from __future__ import annotations

from dataclasses import dataclass

from .charts import Figure

DASHES = {
    "solid": "none",
    "dash": "8 5",
    "dot": "2 4",
    "dashdot": "8 4 2 4",
    "longdash": "14 4",
    "longdashdot": "14 4 2 4",
    "2px,4px": "2 4",
}


# Markers as paths around (0, 0), five units wide.
SHAPES = {
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
class Entry:
    """A line and a marker as they are drawn in the chart.

    Attributes:
        name: what they stand for.
        line: colour, dashes and width of the line; None where there is none.
        marker: path, fill and outline of the marker; None where there is none.
    """

    name: str
    line: tuple[str, str, float] | None
    marker: tuple[str, str, str] | None


def legend(figure: Figure) -> list[Entry]:
    """Return an entry for each name in a figure."""
    entries: dict[str, Entry] = {}
    for trace in figure["data"]:
        line = marker = None
        if "lines" in trace["mode"]:
            drawn = trace["line"]
            dashes = DASHES[drawn.get("dash", "solid")]
            line = (drawn["color"], dashes, drawn["width"])
        if "markers" in trace["mode"]:
            drawn = trace["marker"]
            symbol, colour = drawn["symbol"].removesuffix("-open"), drawn["color"]
            hollow = drawn["symbol"].endswith("-open")
            edge = colour if hollow else drawn.get("line", {}).get("color", colour)
            marker = (SHAPES[symbol], "none" if hollow else colour, edge)
        entries.setdefault(trace["name"], Entry(trace["name"], line, marker))
    return list(entries.values())
