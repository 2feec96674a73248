"""Predictions after histories of several lengths, compared with those after the full history."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._torch.number_formats import wide
from ..data.nest import (
    Nest,
    State,
    as_real,
    detach,
    map_leaves,
    named_leaves,
    select_rows,
)
from ..data.segment import Segment, check_finite
from ..estimate.history_curve import HistorySums, PartSums
from ..model.objective import Objective
from ..model.recurrent import Recurrent
from ..model.running import run_pieces
from .checks import rows_with_loss
from .end_points import EndPoints, run

Array = NDArray[np.float64]
Predict = Callable[[Any], Nest]


@dataclass(frozen=True)
class Histories:
    """How to run a model after histories of several lengths.

    Attributes:
        objective: model and loss.
        start: state of one row that histories start from; None is the initial state.
        predict: from outputs to predictions; None compares the outputs.
    """

    objective: Objective
    start: State = None
    predict: Predict | None = None

    def measure(self, groups: Iterable[EndPoints], lengths: tuple[int, ...]) -> HistorySums:
        """Compare predictions and loss with those of the full history.

        The caller preserves the model and disables gradients.

        Args:
            groups: end points; each is an independent group.
            lengths: histories in steps, ascending; where a window is shorter, all of it.
        """
        found = [self._group(points, lengths) for points in groups]
        found = [group for group in found if group.end_points]
        if len(found) < 3:
            raise ValueError(
                f"only {len(found)} groups of end points have a loss: nearly every target is masked"
            )
        parts = tuple(
            PartSums(
                np.stack([group.changes[:, part] for group in found], axis=-1),
                np.array([group.squares[part] for group in found]),
                np.stack([group.totals[part] for group in found]),
                name,
            )
            for part, name in enumerate(found[0].names)
        )
        counts = np.array([group.end_points for group in found])
        weights = np.array([group.weight for group in found])
        losses = np.stack([group.losses for group in found], axis=-1)
        return HistorySums(lengths, parts, counts, losses, weights)

    def _group(self, points: EndPoints, lengths: tuple[int, ...]) -> _Group:
        history = points.history
        check_finite(history.inputs)
        # Predictions without a loss do not matter to the user, so they do not count.
        scored, weight = np.ones(history.rows, dtype=bool), float(history.rows)
        if not points.per_window:
            scored = rows_with_loss(points.targets, self.objective.count_losses)
            weight = self.objective.count_losses(points.targets)
        full, full_loss = self._at_end(points, points.entering, scored, "the full history")
        losses, changes = [], []
        for length in lengths:
            entering = self._entering(history, length)
            what = f"{length} steps of history"
            short, loss = self._at_end(points, entering, scored, what)
            losses.append(loss)
            changes.append([float((short[name] - full[name]).square().sum()) for name in full])
        return _Group(
            float(scored.sum()),
            weight,
            np.array([*losses, full_loss]),
            np.array(changes),
            [float(part.square().sum()) for part in full.values()],
            [part.sum(dim=0).cpu().numpy() for part in full.values()],
            list(full),
        )

    def _entering(self, history: Segment, length: int) -> State:
        """Return the state that enters the last step of a model that reads `length` inputs.

        The present input counts: with a length of 1 the start state itself enters the last step.
        """
        recurrent = self.objective.recurrent
        if self.start is None:
            state = recurrent.initial_state(history.inputs)
        else:
            same = torch.zeros(history.rows, dtype=torch.long)
            state = select_rows(self.start, same, recurrent.dims(history.inputs))
        first = max(history.steps - length, 0)
        return run(recurrent, history.between(first, history.steps - 1), detach(state))

    def _at_end(
        self, points: EndPoints, entering: State, scored: NDArray[np.bool_], what: str
    ) -> tuple[dict[str, Tensor], float]:
        """Return predictions by name, and the loss, at the end points."""
        objective, history = self.objective, points.history
        last = history.between(history.steps - 1, history.steps)
        (piece,) = run_pieces(objective.recurrent, last, entering)
        outputs = objective.recurrent.head(piece.features)
        predictions = outputs if self.predict is None else self.predict(outputs)
        parts = {
            name: part[torch.from_numpy(scored).to(part.device)]
            for name, part in by_row(predictions, history.rows).items()
        }
        if not all(torch.isfinite(part).all() for part in parts.values()):
            raise ValueError(f"predictions after {what} are NaN or infinite: the model overflows")
        if not scored.any():
            return parts, np.nan
        loss = objective.loss_fn if points.per_window else objective.loss_of
        return parts, float(loss(outputs, points.targets))


class _Group(NamedTuple):
    """What one group adds to `HistorySums`; parts are the tensors of the predictions."""

    end_points: float
    weight: float
    losses: Array  # (lengths + 1,)
    changes: Array  # (lengths, parts)
    squares: list[float]
    totals: list[Array]
    names: list[str]


def by_row(predictions: Nest, rows: int) -> dict[str, Tensor]:
    """Return `(rows, features)` in float64 of every tensor that has a row for each end point.

    Predictions of one step may be `(1, rows, ...)`, `(rows, 1, ...)` or `(rows, ...)`.
    """
    parts = {
        name: wide(leaf).reshape(rows, -1)
        for name, leaf in named_leaves(as_real(predictions))
        if leaf.is_floating_point() and rows in leaf.shape[:2]
    }
    if not parts:
        shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(predictions)}
        raise TypeError(
            f"expected predictions of one step as floating-point tensors (1, {rows}, ...), got "
            f"{shapes or type(predictions).__name__}: pass predict=, a function from the model's "
            "outputs to such tensors"
        )
    return parts


def check_start(recurrent: Recurrent, start: State, inputs: Nest) -> State:
    """Return a start state of one row on the device of the model; refuse one of more rows."""
    if start is None:
        return None
    state = as_real(recurrent.place(start))
    recurrent.check_rows(state, map_leaves(lambda leaf: leaf[:1, :1], recurrent.place(inputs)))
    return state
