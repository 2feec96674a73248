"""The table of an experiment: ours with standard deviation, the paper's beside it."""

from __future__ import annotations

import csv
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from adaptive_tbptt.train import write_text

from .cells import deviation, fingerprint, score_of
from .paper import Experiment

Row = dict[str, Any]


def rows(experiment: Experiment, cells: list[dict[str, Any]]) -> list[Row]:
    """Return a row per setting that has finished cells, in the paper's order."""
    table = []
    for setting in experiment.settings:
        mine = [cell for cell in cells if cell["setting"] == setting]
        if not mine:
            continue
        row: Row = {
            "setting": setting,
            "inits": len(mine),
            "epochs": max(cell["epochs"] for cell in mine),
        }
        for metric in experiment.metrics:
            factor = experiment.factors.get(metric, 1.0)
            values = [factor * score_of(c, metric) for c in mine]
            printed = experiment.printed.get(setting, {}).get(metric)
            row[f"{metric}_mean"] = statistics.fmean(values)
            row[f"{metric}_sd"] = deviation(values)
            row[f"{metric}_paper"], row[f"{metric}_paper_sd"] = printed or (None, None)
        ks = [k for cell in mine for k in cell["curves"]["k"]]
        row["k_least"], row["k_median"], row["k_largest"] = min(ks), statistics.median(ks), max(ks)
        row["updates"] = statistics.fmean(cell["updates"] for cell in mine)
        row["minutes"] = statistics.fmean(cell["seconds"] for cell in mine) / 60
        table.append(row)
    return table


def command_of(experiment: Experiment, preset: str, cells: list[dict[str, Any]]) -> str:
    """Return the command that makes these cells; refuse cells that no one command makes."""
    configs = [cell["config"] for cell in cells if cell.get("config")]
    ours = _own(experiment)
    for config in configs:
        differing = [
            f"{name}: {value} and {config.get(name)}"
            for name, value in configs[0].items()
            if name not in ours and config.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"the cells were made with different configurations ({'; '.join(differing)}), "
                "so they do not form a table"
            )
    refuse_foreign(experiment, cells, [preset])
    base, _ = experiment.presets[preset]
    command = f"atbptt-paper reproduce {experiment.name} --preset {preset}"
    command += f" --inits {len({cell['init'] for cell in cells})}"
    if configs and configs[0].get("data") is not None:
        command += " --data FOLDER"
    if configs and configs[0].get("partial"):
        command += " --partial"
    if configs and configs[0]["epochs"] != base.epochs:
        command += f" --epochs {configs[0]['epochs']}"
    made = {cell["setting"] for cell in cells}
    if made != set(experiment.settings):
        command += "".join(f' --only "{s}"' for s in experiment.settings if s in made)
    return command


def _own(experiment: Experiment) -> set[str]:
    """Return what the cells of a table may differ in."""
    return {"seed", "k", "delta"} | {key for v in experiment.settings.values() for key in v}


def refuse_foreign(
    experiment: Experiment, cells: list[dict[str, Any]], presets: Iterable[str]
) -> None:
    """Refuse cells of another experiment, or of none of the presets given."""
    free = _own(experiment) | {"epochs", "data", "partial"}
    bases = {name: fingerprint(experiment.presets[name][0]) for name in presets}
    for cell in cells:
        config = cell.get("config") or {}
        differing = {
            name: [f"{key}: {config[key]} there, {value} here" for key, value in base.items()
                   if key not in free and key in config and config[key] != value]
            for name, base in bases.items()
        }  # fmt: skip
        if all(differing.values()):
            nearest = min(differing, key=lambda name: len(differing[name]))
            raise ValueError(
                f"the cell of {cell['setting']} is not of {experiment.name} with preset "
                f"{nearest} ({'; '.join(differing[nearest])})"
            )


def write_tables(
    experiment: Experiment, cells: list[dict[str, Any]], folder: Path, command: str
) -> None:
    """Write `table.csv` and `table.md`."""
    table = rows(experiment, cells)
    if not table:
        raise ValueError(f"no finished cells under {folder / 'cells'}")
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(
            {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()} for row in table
        )
    write_text(folder / "table.md", _markdown(experiment, table, cells, command))


def _markdown(
    experiment: Experiment, table: list[Row], cells: list[dict[str, Any]], command: str
) -> str:
    heads = ["setting", "inits", "epochs"]
    for label in experiment.metrics.values():
        heads += [label, "paper"] if experiment.printed else [label]
    if experiment.variants:
        heads += ["K: least, median, largest", "updates", "minutes"]
    best = {m: min(row[f"{m}_mean"] for row in table) for m in experiment.metrics}
    lines = [f"# {experiment.title}", "", _line(heads), _line(["---"] * len(heads))]
    for row in table:
        entries = [row["setting"], str(row["inits"]), str(row["epochs"])]
        for metric in experiment.metrics:
            digits = experiment.digits.get(metric, 3)
            mine = _number(row[f"{metric}_mean"], row[f"{metric}_sd"], digits)
            entries.append(f"**{mine}**" if row[f"{metric}_mean"] == best[metric] else mine)
            if experiment.printed:
                printed = row[f"{metric}_paper"], row[f"{metric}_paper_sd"]
                entries.append(_number(*printed, digits))
        if experiment.variants:
            entries.append(f"{row['k_least']}, {row['k_median']:g}, {row['k_largest']}")
            entries += [f"{row['updates']:,.0f}", f"{row['minutes']:.1f}"]
        lines.append(_line(entries))
    lines += [
        "",
        "Test numbers are those of the parameters with the best validation number; standard "
        "deviations over initialisations are in parentheses; our best is in bold.",
        "",
        *(f"- {remark}" for remark in (*_budget(experiment, cells), *experiment.remarks)),
        f"- {_verdicts(cells)}",
        "",
        _origin(cells, command),
    ]
    return "\n".join(lines) + "\n"


def _budget(experiment: Experiment, cells: list[dict[str, Any]]) -> list[str]:
    """Say where the paper's numbers come from longer training."""
    whole, ours = experiment.presets["paper"][0].epochs, max(cell["epochs"] for cell in cells)
    if not experiment.printed or ours >= whole:
        return []
    return [f"The paper's numbers are those of {whole} epochs, ours of {ours}."]


def _verdicts(cells: list[dict[str, Any]]) -> str:
    """Say how stable the runs ended."""
    counts = Counter(re.split(r":| \(", cell["stability"])[0] for cell in cells)
    found = ", ".join(f"{verdict} ({count})" for verdict, count in counts.most_common())
    betas = [cell["decay"]["beta"] for cell in cells]
    return (
        f"Stability at the best parameters, of {len(cells)} runs: {found}; beta between "
        f"{min(betas):.4f} and {max(betas):.4f}."
    )


def _origin(cells: list[dict[str, Any]], command: str) -> str:
    def all_of(name: str) -> str:
        return ", ".join(sorted({cell["origin"][name] for cell in cells}))

    hours = sum(cell["seconds"] for cell in cells) / 3600
    return (
        f"Made on {all_of('machine')}, torch {all_of('torch')}, commit {all_of('commit')}, one "
        f"thread a cell, {hours:.1f} hours of training in all, with\n\n    {command}"
    )


def _number(mean: float | None, deviation: float | None, digits: int) -> str:
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ({deviation:.{digits}f})")


def _line(entries: list[str]) -> str:
    return "| " + " | ".join(entries) + " |"
