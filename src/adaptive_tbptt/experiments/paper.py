"""The paper's tables: which settings, and the numbers it printed (mean, standard deviation)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..tasks import copy_task
from .cells import Cell, grid
from .config import nearest

Printed = dict[str, dict[str, tuple[float, float]]]


def _rows(text: str) -> Printed:
    """Read rows of 'setting valid sd test sd'."""
    rows: Printed = {}
    for line in text.strip().splitlines():
        setting, valid, valid_sd, test, test_sd = line.split()
        rows[setting] = {
            "valid_ppl": (float(valid), float(valid_sd)),
            "test_ppl": (float(test), float(test_sd)),
        }
    return rows


@dataclass(frozen=True)
class Experiment:
    """A table of the paper.

    Attributes:
        name: what `atbptt reproduce` calls it.
        title: what it is.
        presets: configuration and number of initialisations of each budget.
        ks: fixed truncation lengths.
        deltas: tolerances.
        variants: further settings by name, where it is not K or delta that differs.
        metrics: columns of the table.
        printed: the paper's numbers.
        data_file: name of the file to look for in `--data`.
        remarks: what a reader of the table should know.
    """

    name: str
    title: str
    presets: dict[str, tuple[Any, int]]
    metrics: dict[str, str]
    data_file: str
    ks: tuple[int, ...] = ()
    deltas: tuple[float, ...] = ()
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    printed: Printed = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """What each row of the table changes in the configuration, in the paper's order."""
        rows: dict[str, dict[str, Any]] = {f"K={k}": {"k": k} for k in self.ks}
        rows |= {f"delta={d:g}": {"delta": d} for d in self.deltas}
        return rows | {name: {"name": name, **v} for name, v in self.variants.items()}

    def cells(
        self, preset: str, inits: int | None = None, data: Path | None = None, **changes: Any
    ) -> list[Cell]:
        """Return the cells of a budget."""
        if preset not in self.presets:
            raise nearest(preset, self.presets, "preset")
        base, rounds = self.presets[preset]
        if data is not None:
            path = data / self.data_file if data.is_dir() else data
            if not path.exists():
                raise ValueError(f"{path} does not exist; {self.name} looks for {self.data_file}")
            changes["data"] = str(path)
        return grid(base.changed(**changes), list(self.settings.values()), inits or rounds)


_PPL = {"valid_ppl": "valid PPL", "test_ppl": "test PPL"}
_STITCHED = (
    "With `--data` these are the arrays released with the paper. From step 3423 of the training "
    "rows (426 of the validation and test rows) on they are stitched together from fragments: "
    "sequences break off and others begin in the middle, so part of what follows a break cannot "
    "be predicted by any model. That, not truncation, keeps perplexities from reaching 1. "
    "Without `--data` clean sequences are generated, on which they do.",
    "The release's training window is 2K - 1 steps, ours 2K, so that every loss sees lags 0..K; "
    "its gauge counts phi_tau twice below tau and ours does not.",
)
_QUICK = copy_task.PRESETS["quick"].changed(epochs=20)

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        Experiment(
            name="copy-fixed",
            title="Synthetic copy, fixed m = 10",
            presets={
                "paper": (copy_task.PRESETS["paper"].changed(error_bar_every=5), 9),
                "quick": (_QUICK.changed(error_bar_every=4, error_bar_repeats=5), 1),
            },
            ks=(5, 10, 15, 20, 30),
            deltas=(0.9, 0.5, 0.1),
            metrics=_PPL,
            printed=_rows("""
                K=5 1.655 0.012 1.646 0.012
                K=10 1.035 0.007 1.036 0.005
                K=15 1.038 0.005 1.039 0.003
                K=20 1.045 0.009 1.040 0.006
                K=30 1.044 0.007 1.043 0.004
                delta=0.9 1.018 0.005 1.022 0.006
                delta=0.5 1.024 0.003 1.027 0.002
                delta=0.1 1.029 0.004 1.030 0.005
            """),
            data_file="fixed.npz",
            remarks=_STITCHED,
        ),
        Experiment(
            name="copy-variable",
            title="Synthetic copy, variable m in [5, 10]",
            presets={
                "paper": (copy_task.PRESETS["paper-variable"].changed(error_bar_every=5), 9),
                "quick": (_QUICK.changed(m_min=2, error_bar_every=4, error_bar_repeats=5), 1),
            },
            ks=(5, 10, 15, 20, 30),
            deltas=(0.9, 0.5, 0.1),
            metrics=_PPL,
            printed=_rows("""
                K=5 1.46 0.01 1.47 0.01
                K=10 1.41 0.02 1.39 0.02
                K=15 1.39 0.03 1.37 0.03
                K=20 1.39 0.03 1.35 0.03
                K=30 1.33 0.02 1.31 0.01
                delta=0.9 1.37 0.02 1.35 0.02
                delta=0.5 1.33 0.01 1.32 0.02
                delta=0.1 1.31 0.01 1.29 0.01
            """),
            data_file="variable.npz",
            remarks=_STITCHED,
        ),
        Experiment(
            name="copy-optimisers",
            title="Synthetic copy, fixed m = 10, K = 10, other optimisers",
            presets={
                "paper": (copy_task.PRESETS["paper"].changed(k=10, epochs=100), 1),
                "quick": (_QUICK.changed(k=10, epochs=10), 1),
            },
            metrics=_PPL,
            data_file="fixed.npz",
            variants={
                "SGD": {},
                "momentum": {"momentum": 0.9, "lr": 0.1},
                "decay": {"lr_decay": 0.99},
                "Adadelta": {"optimizer": "adadelta", "step_scale": "none"},
            },
            remarks=_STITCHED,
        ),
    )
}


def experiment(name: str) -> Experiment:
    """Return a table by name."""
    if name not in EXPERIMENTS:
        raise nearest(name, EXPERIMENTS, "experiment")
    return EXPERIMENTS[name]
