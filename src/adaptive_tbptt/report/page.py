"""The report as one HTML file that needs no network: Plotly, data, style and script are inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..train.files import write_text
from ..train.provenance import version
from .asked_chart import asked_chart
from .charts import Chart, beta_chart, bias_chart, loss_chart, short, truncation_chart
from .decay_chart import decay_chart
from .legend import legend
from .read import Run, read_runs
from .tables import configuration, differences, machines, overview

UNITS = (("h", 3600.0, 2 * 3600.0), ("min", 60.0, 2 * 60.0), ("s", 1.0, 0.0))


def write_run_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one or several run folders.

    Args:
        folders: run folders; the first is the one that differences are named against.
        out: the file; `report.html` in the folder of a single run, or in the current one.

    Returns: the path of the file.
    """
    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    page = render(read_runs(folders))
    try:
        write_text(path, page)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def render(runs: Sequence[Run]) -> str:
    """Return the page."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            f"the report needs {error.name}: pip install 'adaptive-tbptt[report]'"
        ) from error
    courses = [loss_chart(runs), truncation_chart(runs), beta_chart(runs), bias_chart(runs)]
    decay, frames = decay_chart(runs)
    asked = asked_chart(runs)
    unit, divisor = _time_unit(runs)
    drawn = [chart for chart in courses if chart.figure is not None]
    for chart in drawn:
        _in_unit(chart, divisor)
    data = {
        "figures": {c.id: c.figure for c in [*drawn, decay, asked] if c.figure is not None},
        "axes": {"epoch": "epochs (passes over the data)", "time": f"training time ({unit})"},
        "courses": [chart.id for chart in drawn],
        "frames": frames,
    }
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_resource("page.html")).render(
        runs=runs,
        legend=legend,
        courses=courses,
        decay=decay,
        positions=len(frames["positions"]) if frames else 0,
        asked=asked,
        overview=overview(runs),
        differences=differences(runs) if len(runs) > 1 else None,
        configuration=configuration(runs),
        machines=machines(runs),
        version=version(),
        style=_resource("page.css"),
        script=_resource("page.js"),
        plotly=get_plotlyjs(),
        data=_as_json(data),
    )


def _time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    """Return the unit in which the longest run has at least two."""
    longest = max(run.epochs[-1]["seconds"] for run in runs)
    return next((unit, divisor) for unit, divisor, least in UNITS if longest >= least)


def _in_unit(chart: Chart, divisor: float) -> None:
    assert chart.figure is not None
    for trace in chart.figure["data"]:
        trace["meta"]["time"] = short(np.array(trace["meta"]["time"]) / divisor)


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _as_json(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in, whatever runs are called."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
