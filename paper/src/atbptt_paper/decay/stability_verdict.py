"""Is the model stable, data-dependent stable, or only decaying in expectation?

The paper's point ('Vanishing and exploding bounds') is that trained RNNs are usually the third
without being the first two: one step may stretch the state, yet the gradient decays on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adaptive_tbptt.data import Segment, SequenceStream, map_leaves
from adaptive_tbptt.estimate import DecayFit
from adaptive_tbptt.measure import measuring
from adaptive_tbptt.model import Recurrent, advance, as_recurrent

from .contraction import contraction, largest_inputs, layer_suffixes
from .jacobian import jacobian_norms


@dataclass(frozen=True)
class Stability:
    """Which of the paper's three notions of decay the model satisfies.

    Attributes:
        stable: whether a sufficient condition for a contraction holds (Miller and Hardt, 2019);
            None where no condition is known for the module.
        condition: the numbers behind `stable`, as a sentence.
        jacobian_norm: largest ||dh_t/dh_{t-1}|| over the observed states and inputs.
        fit: the decay in expectation.
    """

    stable: bool | None
    condition: str
    jacobian_norm: float
    fit: DecayFit

    @property
    def data_dependent_stable(self) -> bool:
        """Whether no observed step stretches the state (Eq. lipschitz_restrict on the data)."""
        return self.jacobian_norm < 1.0

    @property
    def decays(self) -> bool:
        """Whether the gradient decays in expectation (A-1)."""
        return self.fit.decays

    @property
    def verdict(self) -> str:
        """One sentence that says which of the three it is."""
        stretch = f"one step changes the state by a factor of up to {self.jacobian_norm:.3g}"
        decay = f"beta={self.fit.rate} from lag {self.fit.tau} on"
        if self.stable and self.data_dependent_stable:
            return f"stable: {self.condition}"
        if self.stable:
            return f"stable over several steps together ({self.condition}), though {stretch}"
        if self.data_dependent_stable:
            return f"stable on this data, not shown to be in general: {stretch}"
        if self.decays:
            return f"decaying in expectation though unstable: {decay}, yet {stretch}"
        return f"not decaying: {decay}, and {stretch}"


def stability(
    model: nn.Module | Recurrent,
    inputs: Any,
    fit: DecayFit,
    *,
    resets: Tensor | None = None,
    burn_in: int = 0,
    samples: int = 256,
    seed: int = 0,
) -> Stability:
    """Classify the model at its present parameters.

    Args:
        model: any recurrent module.
        inputs: laid out as the model takes them: where to observe states and inputs.
        fit: the decay measured on such data.
        resets: as in `probe`.
        burn_in: leading steps whose states are not used.
        samples: number of observed (state, input) pairs, drawn at random, whose Jacobian is taken.
        seed: of that draw and of the power iteration.

    The model runs in eval mode: stability is a property of the recurrence, not of its dropout.
    """
    recurrent = as_recurrent(model)
    stream = SequenceStream(inputs, inputs, resets, batch_first=recurrent.batch_first)
    segment = stream.segment(0, len(stream))
    return classify(recurrent, segment, fit, burn_in=burn_in, samples=samples, seed=seed)


def classify(
    recurrent: Recurrent,
    segment: Segment,
    fit: DecayFit,
    *,
    burn_in: int = 0,
    samples: int = 256,
    seed: int = 0,
) -> Stability:
    """Classify the model on a time-first segment; see `stability`."""
    if not 0 <= burn_in < segment.steps:
        raise ValueError(
            f"burn_in must leave some of the {segment.steps} steps to observe, got {burn_in}"
        )
    segment = recurrent.place(segment)
    with measuring([recurrent.module], train=False):
        with torch.no_grad(), largest_inputs(recurrent.module) as largest:
            state = None if burn_in else recurrent.initial_state(segment.inputs)
            if burn_in:
                state = advance(recurrent, segment.between(0, burn_in), state)
            states = [state]
            for t in range(burn_in, segment.steps):
                states.append(advance(recurrent, segment.between(t, t + 1), states[-1]))
        observed = segment.between(burn_in, segment.steps)
        # A step that resets a row has no Jacobian to speak of.
        alive = torch.ones(observed.steps, segment.rows, dtype=torch.bool)
        if observed.resets is not None:
            alive = ~observed.resets.cpu()
        pairs = torch.nonzero(alive.flatten()).flatten()
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
        picks = pairs[order[:samples]]
        if len(picks) == 0:
            return Stability(None, "every observed step starts a sequence", 0.0, fit)
        x = map_leaves(
            lambda leaf: leaf.flatten(0, 1)[picks.to(leaf.device)][None], observed.inputs
        )
        dims = iter(recurrent.dims(segment.inputs))

        def pick(*leaves: Tensor) -> Tensor:
            dim = next(dims)
            if dim is None:
                return leaves[0]
            return torch.cat(leaves, dim).index_select(dim, picks.to(leaves[0].device))

        chosen = map_leaves(pick, *states[:-1])
        norms = jacobian_norms(recurrent, x, chosen, seed=seed)
    norm = float(norms.max())
    stable, condition = contraction(recurrent.module, largest)
    if stable and norm >= 1.0 and not layer_suffixes(recurrent.module):
        # The parts contract, but what the module makes of them may not.
        stable, condition = False, f"its parts contract ({condition}), the whole does not"
    return Stability(stable, condition, norm, fit)
