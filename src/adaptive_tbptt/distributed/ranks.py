"""The processes that train together: each has some of the rows, and all use the same K.

What a step or a decision needs of all rows goes through `Ranks`: the gradient of a window, the lag
norms of a probe, the mean loss. A rank with another K would wait forever in a collective call, so
all ranks follow the decisions of the first.
"""

from __future__ import annotations

import datetime
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist

from ..data.nest import join_rows, map_leaves
from ..data.stream import Stream
from ..errors import TrainingError
from ..estimate.lag_profile import LagProfile
from ..model.recurrent import Recurrent
from .row_shard import RowShard

if dist.is_available():
    # The first step of an optimiser imports this module, by way of torch.compile. Its functions
    # keep the process group that exists at import as their default. A group kept alive like this
    # has threads that crash when Python ends, so import the module now, while there is no group.
    importlib.import_module("torch.distributed.nn")

# Arbitrary: torch's own is 30 minutes for gloo and 10 for NCCL, long for a person who waits.
RANK_TIMEOUT = 300.0

Flags = NDArray[np.bool_]
Packed = list[list[Any]]  # steps and the leaves of their states, as a checkpoint holds them


class Ranks(ABC):
    """The processes that train together: `Alone`, or `Distributed` under torch.distributed.

    Attributes:
        index: the number of this process, from 0.
        count: the number of processes.
    """

    index: int
    count: int

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.index == 0

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Return the first rank's value."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order."""

    @abstractmethod
    def _sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""

    @abstractmethod
    def _copy_first(self, tensor: Tensor) -> None:
        """Replace a tensor by the first rank's."""

    def deal(self, stream: Stream) -> Stream:
        """Return this rank's share of the rows of a stream that every rank holds whole."""
        if self.count == 1 or isinstance(stream, RowShard):
            return stream
        self.own_rows(stream.rows)  # raises if there are too few, before training starts
        return RowShard(stream, self.own_rows)

    def own_rows(self, rows: int) -> range:
        """Return which of all rows are this rank's: contiguous, and as equal as possible."""
        if rows < self.count:
            raise ValueError(
                f"{rows} rows cannot be split over {self.count} processes: every process needs one"
            )
        return range(self.index * rows // self.count, (self.index + 1) * rows // self.count)

    def begin(self, module: nn.Module) -> None:
        """Give every rank the parameters and buffers of the first."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                self._copy_first(tensor)

    def average(
        self, parameters: Iterable[Tensor], loss: Tensor, weight: float
    ) -> tuple[Tensor, float]:
        """Average `.grad` and the loss, weighted by the number of losses of each rank.

        Returns:
            The mean loss over all ranks and the number of losses in it.
        """
        if self.count == 1:
            return loss, weight
        trained = [p for p in parameters if p.requires_grad]
        if any(p.grad is not None and p.grad.is_sparse for p in trained):
            raise ValueError(
                "sparse gradients cannot be averaged over processes: use nn.Embedding(sparse=False)"
            )
        present = [float(p.grad is not None) for p in trained]
        total, whole, *seen = self.total([weight * float(loss), weight, *present])
        if whole == 0.0:
            return loss, 0.0
        # A parameter without a gradient on any rank keeps none, so the optimiser skips it.
        used = [p for p, ranks in zip(trained, seen, strict=True) if ranks > 0.0]
        for dtype in dict.fromkeys(p.dtype for p in used):
            self._average_gradients([p for p in used if p.dtype == dtype], weight / whole)
        return torch.as_tensor(total / whole, dtype=loss.dtype, device=loss.device), whole

    def _average_gradients(self, parameters: list[Tensor], share: float) -> None:
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients]).mul_(share)
        self._sum(flat)
        parts = flat.split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def total_array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of an array over all ranks."""
        if self.count == 1:
            return values
        tensor = torch.from_numpy(values).to(_device())
        self._sum(tensor)
        return np.asarray(tensor.cpu().numpy())

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all ranks."""
        return list(self.total_array(np.array(values, np.float64)).tolist())

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are true on any rank."""
        return [value > 0.0 for value in self.total([float(flag) for flag in flags])]

    def join(self, packed: Packed, recurrent: Recurrent) -> Packed:
        """Put the rows of all ranks' states side by side, as one process would hold them."""
        if self.count == 1:
            return packed
        joined: Packed = []
        for entries in zip(*self.gather(map_leaves(Tensor.cpu, packed)), strict=True):
            step, first = entries[0]
            states = [items for _, items in entries]
            joined.append(
                [step, None if first is None else join_rows(states, recurrent.known_dims)]
            )
        return joined

    def join_profiles(
        self, profile: LagProfile | None, alive: Flags, count: float
    ) -> tuple[LagProfile, Flags]:
        """Join what the ranks probed: one column per row of the whole batch.

        Args:
            profile: of this rank's rows; None if all their targets are masked.
            alive: `(rows,)`, from `alive_rows`.
            count: the number of losses in this rank's last step.
        """
        found = self.gather((profile, alive, count))
        rows = sum(len(a) for _, a, _ in found)
        whole = sum(w for _, _, w in found)
        like = next(p for p, _, _ in found if p is not None)
        # Each rank divided by its own number of losses; the whole batch divides by that of all.
        parts = [
            like.silent(len(a)) if p is None else p.scaled(w / len(a) * rows / whole)
            for p, a, w in found
        ]
        return LagProfile.concatenate(parts), np.concatenate([a for _, a, _ in found])


class Alone(Ranks):
    """One process, which holds all rows."""

    index = 0
    count = 1

    def share(self, value: Any) -> Any:
        """Return the value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the one value."""
        return [value]

    def _sum(self, tensor: Tensor) -> None: ...

    def _copy_first(self, tensor: Tensor) -> None: ...


class Distributed(Ranks):
    """The processes of torch.distributed, each with a copy of the model and a share of the rows.

    Args:
        group: a process group; None is all processes.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    def share(self, value: Any) -> Any:
        """Return the first rank's value."""
        box = [value]
        self._call(dist.broadcast_object_list, box, self._first, device=_device())
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order."""
        values: list[Any] = [None] * self.count
        self._call(dist.all_gather_object, values, value)
        return values

    def _sum(self, tensor: Tensor) -> None:
        self._call(dist.all_reduce, tensor)

    def _copy_first(self, tensor: Tensor) -> None:
        self._call(dist.broadcast, tensor, self._first)

    def _call(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, group=self._group, **kwargs)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise TrainingError(
                f"another process of this run has ended or does not answer ({reason})"
            ) from error


def present_ranks() -> Ranks:
    """Return the processes of torch.distributed where it is initialised, else this one alone."""
    started = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Distributed() if started else Alone()


@contextmanager
def process_group(device: str = "cpu", timeout: float = RANK_TIMEOUT) -> Iterator[str]:
    """Join the processes that `torchrun` started, if it did; yield this one's device.

    Args:
        device: cpu, or cuda for one GPU per process.
        timeout: seconds after which a rank that does not answer counts as dead. It must exceed
            what the first rank takes to write a checkpoint, for which the others wait.
    """
    if timeout <= 0:
        raise ValueError(f"the timeout must be positive, got {timeout} seconds")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.startswith("cuda") else "gloo",
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _device() -> torch.device:
    """Return where the default backend wants the tensors of a collective call."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
