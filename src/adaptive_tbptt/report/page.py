"""The report as one HTML file that needs no network: Plotly, data, style and script are inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from .._version import __version__
from ..errors import DamagedFileError
from ..train.files import write_text
from .asked_chart import asked_chart
from .charts import legend, short
from .decay_chart import decay_chart
from .read import Run, read_runs
from .tables import configuration, differences, machines, overview
from .training_charts import beta_chart, bias_chart, loss_chart, truncation_chart

UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))  # the page uses the first with two or more


def write_run_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one or several run folders, and return its path.

    Args:
        folders: run folders.
        out: the file; `report.html` in the folder of a single run, or in the current one.
    """
    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    runs = read_runs(folders)
    try:
        page = render(runs)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        where = ", ".join(map(str, folders))
        raise DamagedFileError(
            "a value in metrics.jsonl, check_bias.jsonl, starts.jsonl or config.toml of "
            f"{where} is not what a run writes ({type(error).__name__}: {error}): repair the "
            "file, or leave that run out"
        ) from error
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
    longest = max(run.epochs.last["seconds"] for run in runs)
    unit, divisor = next(each for each in UNITS if longest >= 2 * each[1] or each[1] == 1.0)
    figures = {c.id: c.figure for c in [*courses, decay, asked] if c.figure is not None}
    drawn = [chart.id for chart in courses if chart.id in figures]
    for trace in (trace for name in drawn for trace in figures[name]["data"]):
        trace["meta"]["time"] = short(np.array(trace["meta"]["time"]) / divisor)
    data = {
        "figures": figures,
        "axes": {"epoch": "epochs (passes over the data)", "time": f"training time ({unit})"},
        "courses": drawn,
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
        version=__version__,
        style=_resource("page.css"),
        script=_resource("page.js"),
        plotly=get_plotlyjs(),
        # The name of a run must not end the script element that contains it.
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
