"""The words of `diagnose`: what to do about a loop, and what to know about the table."""

from __future__ import annotations

import math

import numpy as np

from ..estimate.level_bias import LevelCurve
from ..estimate.level_sums import LevelSums
from .diagnosis_result import Row


def recommend(rows: tuple[Row, ...], curve: LevelCurve, delta: float) -> str:
    """Say in a sentence what to do about a loop."""
    loop, last = rows[0], rows[-1]
    if curve.hidden:
        return (
            f"Noise hides the gradient of {curve.samples} losses: give more rows, more data or "
            "more seconds"
        )
    single = "A single loss truncated at its own step"
    who = single if loop.losses == 1 else f"Your loop with {loop.losses} steps"
    misses = f"{who} misses {loop.bias:.0%} [{loop.low:.0%}, {loop.high:.0%}] of the gradient"
    if loop.high <= delta:
        return f"{misses}: it needs no context."
    # The first context from which on the upper limit of every row keeps delta.
    shown = [all(r.high <= delta for r in rows[i:]) for i in range(1, len(rows))]
    enough = next((r for r, kept in zip(rows[1:], shown, strict=True) if kept), None)
    halved = next((r for r in rows[1:] if r.bias <= loop.bias / 2), None)
    if enough is None:
        if last.low > delta or halved is None:
            return (
                f"{misses}. No context up to {last.context} is shown to bring that "
                f"below {delta:.0%}: at {last.context} it is {last.bias:.0%} "
                f"[{last.low:.0%}, {last.high:.0%}] at {last.cost:.1f} times the cost."
            )
        return (
            f"{misses}; {_would(halved)}. {curve.samples} losses leave open which context brings "
            f"it below {delta:.0%}."
        )
    if halved is None or halved.context >= enough.context:
        return f"{misses}; {_would(enough)}."
    return (
        f"{misses}; {_would(halved)}, {enough.context} to {enough.bias:.0%} at "
        f"{enough.cost:.1f} times."
    )


def _would(row: Row) -> str:
    steps = "step" if row.context == 1 else "steps"
    return (
        f"{row.context} {steps} of context would bring that to {row.bias:.0%} at {row.cost:.1f} "
        "times the cost"
    )


def reading_notes(curve: LevelCurve, sums: LevelSums) -> list[str]:
    """Say what you should know before you trust the table."""
    notes = []
    if not curve.hidden:
        notes.append(
            f"the {curve.level:.0%} intervals cover the choice of windows: {curve.samples} losses "
            f"in {sums.groups} groups"
        )
    if math.isinf(curve.tail) and not curve.hidden and len(curve.contexts) > 2:
        notes.append(
            f"the gradient has not decayed within {curve.lags} steps: these numbers leave out the "
            "bias beyond; look further back with lags="
        )
    elif math.isfinite(curve.tail) and curve.tail > 0.01:
        notes.append(
            f"beyond {curve.lags} steps, extrapolation finds another {curve.tail:.1%}, which these "
            "numbers leave out"
        )
    if sums.unreached:
        names = ", ".join(sums.unreached[:5]) + (", ..." if len(sums.unreached) > 5 else "")
        notes.append(f"no gradient reaches these parameters: {names}")
    if not np.isfinite(curve.high).all() and not curve.hidden:
        notes.append("some rows are not resolved: more seconds would help")
    return notes
