"""How a model is probed: decided once, then handed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .._torch.number_formats import autocast_format
from ..data.nest import Nest, State, steps_of
from ..data.stream import Segment
from ..model.recurrent import Recurrent
from .fused_layer import find_fused_layer
from .passes import Pass, StepPass, fused_pass

HELD_STEPS = 400  # the paper's longest window; about 300 MiB for an LSTM of 128 units, 64 rows


@dataclass(frozen=True)
class ProbeSettings:
    """What a probe may do to be fast and small.

    Attributes:
        fused: False never takes the fast path for `nn.LSTM`, `nn.GRU` and `nn.RNN`. Otherwise the
            probe takes it where it gives the same numbers as the general one.
        held_steps: steps that are held in memory at once. More lags than these are run forward
            twice, so that memory does not grow with the lags beyond the norms themselves.
    """

    fused: bool = True
    held_steps: int = HELD_STEPS

    def __post_init__(self) -> None:
        if self.held_steps < 1:
            raise ValueError(f"held_steps must be at least 1, got {self.held_steps}")


@dataclass(frozen=True)
class ProbePlan:
    """Which path a probe takes through a model.

    Attributes:
        layer: the layer to take the fast path through; None takes the general one.
        holds_for: device and number formats that this was decided for; None for none.
    """

    layer: nn.RNNBase | None
    holds_for: Any = None

    def run(self, recurrent: Recurrent, segment: Segment, state: State) -> Pass:
        """Run some steps forward."""
        if self.layer is not None:
            passed = fused_pass(recurrent, self.layer, segment, state)
            if passed is not None:
                return passed
        return StepPass(recurrent, segment, state)


def plan_probe(
    recurrent: Recurrent,
    inputs: Nest,
    state: State,
    settings: ProbeSettings,
    known: ProbePlan | None = None,
) -> ProbePlan:
    """Return the plan that is known, if it still holds, or decide.

    Under autocast the products change their type: the general path leaves that to torch.
    """
    cast = autocast_format(recurrent.device)
    now = (recurrent.home, cast, settings.fused)
    if known is not None and known.holds_for == now:
        return known
    if not settings.fused or cast is not None:
        return ProbePlan(None, now)
    layer = find_fused_layer(recurrent, inputs, state)
    return ProbePlan(layer, now if steps_of(inputs) > 1 else None)
