"""One interface for every recurrent module: a core that carries the state, a head that reads it.

PyTorch's RNN, GRU, LSTM and their cells work as they are; so does any module with
`forward(inputs, state) -> (outputs, state)`. A module may also expose `core(inputs, state) ->
(features, state)` and `head(features) -> outputs`. The head then runs only for steps with a loss,
and the gradient at lag 0 can be measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.compiling import compiled_parts, eager, plain
from .._torch.preserve_model import preserve
from ..data.nest import (
    BatchDims,
    Nest,
    State,
    as_real,
    leaves,
    map_leaves,
    named_leaves,
    rows_of,
    select_rows,
    swap_time_and_batch,
)
from .inner_state import InnerState
from .state_layout import Layout, find_layout

LossFn = Callable[[Any, Any], Tensor]


class Recurrent:
    """Wrap a recurrent module as `core`, `head` and `initial_state`, always time first.

    A complex state appears as pairs of real numbers, so its gradient is real and of the same norm.

    Args:
        module: your module; it is used, never changed.
        batch_first: whether the module takes `(batch, time, ...)`. None reads its attribute
            `batch_first`.
        state_batch_dim: batch dimension of every state leaf. None finds it by comparing the
            state of one row with that of two.
        state_in: for a module that is called with inputs alone: where its state is. The name of a
            layer that it runs once over all steps, such as `"lstm"`; or of an attribute, such as
            `"hidden"`; or a list of names, with dots for those of submodules. None if the module
            takes the state and returns it.

    Attributes:
        splits: whether the module exposes `core` and `head`; then its `forward` is never called.
        has_features: whether the module exposes the input of its readout, so that lag 0 can be
            measured.
        time_dim: the dimension of time in what the module returns.
        name: the name of the module's class.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        batch_first: bool | None = None,
        state_batch_dim: int | None = None,
        state_in: str | Sequence[str] | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
        if getattr(module, "bidirectional", False):
            raise ValueError(
                "a bidirectional module reads the future, so it has no truncated gradient; "
                "use a unidirectional one"
            )
        if state_batch_dim is not None and state_batch_dim < 0:
            raise ValueError(f"state_batch_dim counts from the front, got {state_batch_dim}")
        own = getattr(module, "batch_first", False)
        self.module, self.name = module, type(plain(module)).__name__
        self.batch_first = bool(own if batch_first is None else batch_first)
        self.time_dim = int(self.batch_first)
        self.state_batch_dim = state_batch_dim
        self._is_cell = isinstance(plain(module), nn.RNNCellBase)
        self._is_layer = isinstance(plain(module), nn.RNNBase)
        self._holds_lstm = any(isinstance(m, nn.LSTM | nn.LSTMCell) for m in module.modules())
        self._inner = None if state_in is None else InnerState(module, state_in)
        self.splits = self._inner is None and all(
            callable(getattr(module, part, None)) for part in ("core", "head")
        )
        self.has_features = self.splits or self._is_cell or self._is_layer
        self._compiled = compiled_parts(module, "core", "head") if self.splits else {}
        self._first = next(
            (
                (m, name)
                for m in module.modules()
                for name, p in m._parameters.items()
                if p is not None
            ),
            None,
        )
        self._complex: list[bool] | None = None  # of the leaves of the state
        self._layout: Layout | None = None
        self._home: Any = None

    def is_laid_out(self, leaf: Tensor, steps: int, rows: int) -> bool:
        """Whether a tensor that the module returned has the shape of time and batch."""
        return leaf.shape[:2] == ((rows, steps) if self.batch_first else (steps, rows))

    def core(self, inputs: Nest, state: State) -> tuple[Any, State]:
        """Run the recurrence over time-first `inputs`; return features (or outputs) and state."""
        if self._is_cell:
            return self._run_cell(inputs, state)
        if self.batch_first:
            inputs = swap_time_and_batch(inputs)
        run: Any = self._part("core") if self.splits else self._inner or self.module
        own = state if self._is_layer else self._copied(inputs, state)
        try:
            result = run(inputs, own)
        except (TypeError, AttributeError) as error:
            if own is not None:
                raise
            raise TypeError(
                f"{self.name} could not be called as (inputs, state) -> (outputs, state) with None "
                f"for the initial state: {error}. {self._advice()}"
            ) from error
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"{self.name} must return (outputs, state), got "
                f"{type(result).__name__}. {self._advice()}"
            )
        outputs, state = result
        if self._complex is None:
            self._complex = [x.is_complex() for x in leaves(state)]
        return outputs, as_real(state) if any(self._complex) else state

    def _advice(self) -> str:
        """Say how to attach a module that does not take a state and return it."""
        layers = [n for n, m in self.module.named_modules() if isinstance(m, nn.RNNBase)]
        names = repr(layers[0] if len(layers) == 1 else layers or "hidden")
        return (
            "Wrap it in a module that does. Or, if it takes inputs alone, say where its state is, "
            f"a layer or an attribute: at.model.as_recurrent(model, state_in={names})"
        )

    def _run_cell(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        hidden = []
        for x in inputs:
            state = self.module(x, state)
            hidden.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(hidden, dim=self.time_dim), state

    def _copied(self, inputs: Nest, state: State) -> State:
        """Copy the state: your module may write into it, and the library needs it again."""
        if state is not None and self._complex is None:  # resumed: the module has not run yet
            with preserve(self.module, train=False), torch.no_grad(), eager():
                self.core(map_leaves(lambda leaf: leaf[:1, :1], inputs), None)
        if not any(self._complex or ()):
            return map_leaves(Tensor.clone, state)
        flags = iter(self._complex or ())

        def copied(leaf: Tensor) -> Tensor:
            if not next(flags) or leaf.is_complex():
                return leaf.clone()
            return torch.view_as_complex(leaf.clone(memory_format=torch.contiguous_format))

        return map_leaves(copied, state)

    def head(self, features: Any) -> Any:
        """Turn features into outputs; the identity if the module has no head."""
        return self._part("head")(features) if self.splits else features

    def _part(self, name: str) -> Any:
        return self._compiled.get(name) or getattr(self.module, name)

    def initial_state(self, inputs: Nest) -> State:
        """Return the state that `None` stands for, one row per row of `inputs`.

        A module's own `initial_state(rows)` comes first, so that a learned initial state keeps its
        gradient. Otherwise the state is zero; one step checks that `None` gives the same result.
        """
        layout = self._learn_layout(inputs)
        rows = rows_of(inputs)
        own = getattr(self.module, "initial_state", None)
        if callable(own):
            return as_real(own(rows))
        if layout.start is None:
            raise ValueError(
                f"{self.name} does not start from zeros, learns its start, or carries more than "
                "tensors, so its initial state is unknown: pass state=, set burn_in >= 1, or give "
                "it a method initial_state(rows)"
            )
        return select_rows(layout.start, torch.zeros(rows, dtype=torch.long), layout.dims)

    def dims(self, inputs: Nest) -> BatchDims:
        """Return the batch dimension of each state leaf."""
        return self._learn_layout(inputs).dims

    @property
    def known_dims(self) -> BatchDims:
        """The batch dimension of each state leaf, once `dims` has found it."""
        if self._layout is None:
            raise RuntimeError("the layout of the state is not known yet: call dims(inputs)")
        return self._layout.dims

    @property
    def joins(self) -> bool | None:
        """Whether pieces of what the module returns can be joined along time; None if unknown."""
        return None if self._layout is None else self._layout.flat is not None

    def join(self, pieces: list[Any], rows: int) -> Any:
        """Join what the module returned for consecutive steps, if it `joins`."""
        assert self._layout is not None
        flat = iter(self._layout.flat or ())

        def joined(*parts: Tensor) -> Tensor:
            if not next(flat) or not self.batch_first:
                return torch.cat(parts, self.time_dim)
            return torch.cat([part.unflatten(0, (rows, -1)) for part in parts], 1).flatten(0, 1)

        return map_leaves(joined, *pieces)

    def template(self, inputs: Nest) -> State:
        """Return a state of one row, for its structure."""
        return self._learn_layout(inputs).example

    def _learn_layout(self, inputs: Nest) -> Layout:
        home = self.home
        if self._layout is None or self._home != home:
            self._layout, self._home = find_layout(self, inputs), home
        return self._layout

    @property
    def home(self) -> tuple[torch.device, torch.dtype] | None:
        """Device and number format of the first parameter; the layout found holds for these."""
        first = next(self.module.parameters(), None)
        return None if first is None else (first.device, first.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU if the module has neither."""
        first: Tensor | None = None
        if self._first is not None:  # every window reads this, so try the known place first
            first = self._first[0]._parameters.get(self._first[1])
        if first is None:
            first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    def place(self, nest: Nest) -> Nest:
        """Move tensors to the device of the model."""
        device = self.device
        return map_leaves(lambda leaf: leaf.to(device), nest)

    def components(self, nest: State) -> dict[str, Tensor]:
        """Split a state, or its gradient, into `(rows, dims)` parts: layer by layer, h and c apart.

        Dimensions before a leaf's batch dimension are layers, those after it are flattened.
        """
        stacked = self.stacked_components(map_leaves(lambda x: x[None], nest))
        return {name: part[0] for name, part in stacked.items()}

    def stacked_components(self, nest: State) -> dict[str, Tensor]:
        """Return `(steps, rows, dims)` parts of states that are stacked along a first dimension."""
        parts = {}
        pair = type(nest) is tuple and [type(x) for x in nest] == [Tensor, Tensor]
        names = {"0": "h", "1": "c"} if self._holds_lstm and pair else {"state": "h"}
        for (name, leaf), dim in zip(named_leaves(nest), self.known_dims, strict=True):
            if dim is None or not leaf.is_floating_point():
                continue
            steps, *rest = leaf.shape
            layers = leaf.reshape(steps, -1, rest[dim], math.prod(rest[dim + 1 :]))
            label = names.get(name, name)
            for i, layer in enumerate(layers.unbind(1)):
                parts[label if dim == 0 else f"{label}[{i}]"] = layer
        return parts

    def check_rows(self, state: State, inputs: Nest, rows: int | None = None) -> None:
        """Refuse a state that is not laid out as the model's, for `rows` or those of `inputs`."""
        rows, dims = rows_of(inputs) if rows is None else rows, self.dims(inputs)
        named = list(named_leaves(state))
        own = list(named_leaves(self.template(inputs)))
        if len(named) != len(dims):
            shapes = ", ".join(f"'{name}' {tuple(leaf.shape)}" for name, leaf in named)
            names = ", ".join(f"'{name}'" for name, _ in own)
            raise ValueError(
                f"the state has {len(named)} tensors ({shapes}), that of {self.name} has "
                f"{len(dims)} ({names})"
            )
        for (name, leaf), (_, one), dim in zip(named, own, dims, strict=True):
            if dim is None:
                continue
            if leaf.dim() != one.dim() or leaf.shape[dim] != rows:
                expected = list(one.shape)
                expected[dim] = rows
                raise ValueError(
                    f"state leaf '{name}' has shape {tuple(leaf.shape)}; {self.name} carries "
                    f"{tuple(expected)} for {rows} rows: dimension {dim} counts the rows"
                )


def as_recurrent(
    model: nn.Module | Recurrent,
    *,
    batch_first: bool | None = None,
    state_batch_dim: int | None = None,
    state_in: str | Sequence[str] | None = None,
) -> Recurrent:
    """Wrap `model` unless it is wrapped already; for the arguments see `Recurrent`.

    A `DistributedDataParallel` is unwrapped: windows average their gradients themselves, and a
    probe must not wait for other processes.

    >>> class Forecast(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.lstm, self.readout = nn.LSTM(2, 8), nn.Linear(8, 1)
    ...
    ...     def forward(self, inputs):
    ...         return self.readout(self.lstm(inputs)[0])
    >>> model = as_recurrent(Forecast(), state_in="lstm")
    >>> outputs, (h, c) = model.core(torch.randn(5, 3, 2), None)
    >>> outputs.shape, h.shape
    (torch.Size([5, 3, 1]), torch.Size([1, 3, 8]))
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if not isinstance(model, Recurrent):
        return Recurrent(
            model, batch_first=batch_first, state_batch_dim=state_batch_dim, state_in=state_in
        )
    if batch_first not in (None, model.batch_first) or (
        state_batch_dim not in (None, model.state_batch_dim) or state_in is not None
    ):
        raise ValueError(
            "the model is wrapped already, with another layout: pass the layout only once, to "
            "as_recurrent"
        )
    return model
