"""From uses of parameters, or gradients given in full, to contributions, lag by lag."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from .._torch.number_formats import wide
from ..data.nest import Nest
from ..data.segment import rows_of, steps_of
from ..estimate.contributions import Contributions, group_edges
from ..model.recurrent import Recurrent
from .affine_uses import Recorder, Use, squared_norms, trained
from .sketch import Sketch


class ParameterLags:
    """Contributions as they come in, the newest steps first.

    Args:
        recurrent: the model.
        window: number of lags to come.
        rows: samples.
        size: of the sketches; 0 makes none.
        affine: whether every use of a parameter is known to be an affine map, so that it can be
            recorded; otherwise gradients are taken row by row.

    Attributes:
        parameters: those that require a gradient, by name.
        scale: what the loss was multiplied by.
    """

    def __init__(
        self, recurrent: Recurrent, window: int, rows: int, size: int, *, affine: bool
    ) -> None:
        self.parameters = trained(recurrent.module)
        if not self.parameters:
            raise ValueError("no parameter of the model requires a gradient")
        for name, parameter in self.parameters.items():
            if parameter.is_complex():
                raise TypeError(
                    f"parameter '{name}' is complex: its gradient is measured where it is stored "
                    "as pairs of real numbers (torch.view_as_real), or by a gauge of the state"
                )
        self.rows, self.affine, self.scale = rows, affine, 1.0
        self._sketch = _sketch_of(recurrent, self.parameters, size) if size else None
        self._cuts = group_edges(rows)
        self._norms = np.zeros((window, rows))
        self._sketches = np.zeros((window, len(self._cuts) - 1, size), np.float32)
        self._next = 0

    def recorder(
        self, recurrent: Recurrent, inputs: Nest, beside: nn.Module | None = None
    ) -> Recorder:
        """Return what notes the uses of parameters, but for those of the module `beside`."""
        other = set() if beside is None else {id(p) for p in beside.parameters()}
        return Recorder(
            [p for p in self.parameters.values() if id(p) not in other],
            steps=steps_of(inputs),
            rows=rows_of(inputs),
            batch_first=recurrent.batch_first,
        )

    def add_uses(self, uses: list[Use], steps: int) -> None:
        """Take in consecutive steps, in the order of time; those without a use contribute none."""
        first, self._next = self._next, self._next + steps
        if not uses:
            return
        norms = squared_norms(uses).sqrt().flip(0) / self.scale
        self._norms[first : self._next] = norms.cpu().numpy()
        if self._sketch is not None:
            stop = self._next
            for part in self._sketch.uses(uses):  # in the order of time, so lags go down
                start = stop - len(part)
                for i, rows in enumerate(self._groups()):
                    summed = part[:, rows].sum(dim=1).flip(0) / self.scale
                    self._sketches[start:stop, i] = summed.float().cpu().numpy()
                stop = start

    def add_rows(self, gradients: Iterable[list[Tensor | None]]) -> None:
        """Take in one step: the gradient of every parameter, row by row."""
        groups = np.searchsorted(self._cuts, np.arange(self._cuts[-1]), side="right") - 1
        for row, raw in enumerate(gradients):
            given = [None if g is None else g.to_dense() for g in raw]  # of a sparse embedding
            norms = [wide(g).norm() for g in given if g is not None]
            norm = torch.stack(norms).norm() if norms else torch.zeros(())
            self._norms[self._next, row] = float(norm) / self.scale
            if self._sketch is not None:
                sketch = self._sketch.dense(given) / self.scale
                self._sketches[self._next, groups[row]] += sketch.float().cpu().numpy()
        self._next += 1

    def result(self) -> Contributions:
        """Return everything that came in."""
        if not (np.isfinite(self._norms).all() and np.isfinite(self._sketches).all()):
            raise ValueError("the gradient of a parameter is NaN or infinite")
        return Contributions(self._norms, self._sketches, np.diff(self._cuts))

    def _groups(self) -> list[slice]:
        return [slice(a, b) for a, b in zip(self._cuts[:-1], self._cuts[1:], strict=True)]


def _sketch_of(recurrent: Recurrent, parameters: dict[str, Tensor], size: int) -> Sketch:
    """Return the model's map, drawn once."""
    known = recurrent.sketch
    if known is None or known.size != size or not known.is_of(parameters):
        recurrent.sketch = known = Sketch(parameters, size)
    return known
