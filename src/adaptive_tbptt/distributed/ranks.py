"""The processes that train together: each has some of the rows, and all use the same K.

`Alone` is one process, for which everything here is trivial; `Distributed` is the processes of
torch.distributed. What a step or a decision needs of all rows goes through them: the gradient
of a window, the lag norms of a probe, the mean loss. A rank with another K would wait for ever in
a collective call, so the first rank's decisions are everyone's.
"""

from __future__ import annotations

import datetime
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist

from ..data.stream import Stream
from ..errors import TrainingError
from ..estimate.lag_profile import LagProfile
from ..model.recurrent import Recurrent
from .row_shard import RowShard

if dist.is_available():
    # Its functions take the group that exists when they are imported as their default, and the
    # first step of an optimiser imports them, by way of torch.compile. A group kept alive by that
    # has threads which crash when Python ends, so let it be now, while there is none.
    importlib.import_module("torch.distributed.nn")


Flags = NDArray[np.bool_]


Packed = list[list[Any]]


"""Steps and the leaves of their states, as a `Trajectory` saves them."""


class Ranks(ABC):
    """The processes that train together. `Alone` is one, `Distributed` those of torch.distributed.

    Attributes:
        index: which one this is.
        count: how many there are.
    """

    index: int
    count: int

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.index == 0

    @abstractmethod
    def deal(self, stream: Stream) -> Stream:
        """Return this rank's share of the rows of a stream."""

    @abstractmethod
    def own_rows(self, rows: int) -> range:
        """Return which of all rows are this rank's."""

    @abstractmethod
    def begin(self, module: nn.Module) -> None:
        """Give every rank the parameters and buffers of the first."""

    @abstractmethod
    def average(
        self, parameters: Iterable[Tensor], loss: Tensor, weight: float
    ) -> tuple[Tensor, float]:
        """Average `.grad` and the loss, weighted by how many losses each rank carried.

        Returns:
            The mean loss over all ranks and the number of losses in it.
        """

    @abstractmethod
    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all ranks."""

    @abstractmethod
    def total_array(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum of an array over all ranks."""

    @abstractmethod
    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags any rank has raised."""

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Return the first rank's value."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order."""

    @abstractmethod
    def join(self, packed: Packed, recurrent: Recurrent) -> Packed:
        """Put the rows of all ranks' states side by side."""

    @abstractmethod
    def join_profiles(
        self, profile: LagProfile | None, alive: Flags, count: float
    ) -> tuple[LagProfile, Flags]:
        """Join what the ranks probed: one column per row of the whole batch.

        Args:
            profile: of this rank's rows; None where all their targets are masked.
            alive: `(rows,)`, from `alive_rows`.
            count: how many losses this rank's last step held.
        """


class Alone(Ranks):
    """One process: everything is its own."""

    index = 0
    count = 1

    def deal(self, stream: Stream) -> Stream:
        """Return the stream."""
        return stream

    def own_rows(self, rows: int) -> range:
        """Return all rows."""
        return range(rows)

    def begin(self, module: nn.Module) -> None:
        """Nothing is to be shared."""

    def average(
        self, parameters: Iterable[Tensor], loss: Tensor, weight: float
    ) -> tuple[Tensor, float]:
        """Return the loss as it is."""
        return loss, weight

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the numbers."""
        return list(values)

    def total_array(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the array."""
        return values

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return the flags."""
        return list(flags)

    def share(self, value: Any) -> Any:
        """Return the value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the one value."""
        return [value]

    def join(self, packed: Packed, recurrent: Recurrent) -> Packed:
        """Return the states."""
        return packed

    def join_profiles(
        self, profile: LagProfile | None, alive: Flags, count: float
    ) -> tuple[LagProfile, Flags]:
        """Return the profile."""
        assert profile is not None
        return profile, alive


class Distributed(Ranks):
    """The processes of torch.distributed, one model and one share of the rows in each.

    Args:
        group: a process group; None is all of them.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    def deal(self, stream: Stream) -> Stream:
        """Return this rank's share of the rows of a stream that every rank holds whole."""
        if isinstance(stream, RowShard):
            return stream
        self.own_rows(stream.rows)  # refuses too few before any is trained on
        return RowShard(stream, self.own_rows)

    def own_rows(self, rows: int) -> range:
        """Return a contiguous share of the rows, as equal as can be."""
        if rows < self.count:
            raise ValueError(
                f"{rows} rows cannot be split over {self.count} processes: every process needs one"
            )
        return range(self.index * rows // self.count, (self.index + 1) * rows // self.count)

    def begin(self, module: nn.Module) -> None:
        """Give every rank the parameters and buffers of the first."""
        with torch.no_grad(), _together():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, self._first, group=self._group)

    def average(
        self, parameters: Iterable[Tensor], loss: Tensor, weight: float
    ) -> tuple[Tensor, float]:
        """Average `.grad` and the loss, weighted by how many losses each rank carried."""
        trained = [p for p in parameters if p.requires_grad]
        if any(p.grad is not None and p.grad.is_sparse for p in trained):
            raise ValueError(
                "a sparse gradient cannot be averaged over processes: nn.Embedding(sparse=False)"
            )
        present = [float(p.grad is not None) for p in trained]
        summed = self._sum([weight * float(loss), weight, *present], loss.device)
        mean, whole = summed[0], summed[1]
        if whole == 0.0:
            return loss, 0.0
        for dtype in dict.fromkeys(p.dtype for p in trained):
            # Where no rank has a gradient there is none: an optimiser leaves those alone.
            used = [
                p
                for p, seen in zip(trained, summed[2:], strict=True)
                if p.dtype == dtype and seen > 0.0
            ]
            if used:
                self._average_one_type(used, weight / whole)
        return torch.as_tensor(mean / whole, dtype=loss.dtype, device=loss.device), whole

    def _average_one_type(self, parameters: list[Tensor], share: float) -> None:
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients]).mul_(share)
        with _together():
            dist.all_reduce(flat, group=self._group)
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def _sum(self, values: Sequence[float], device: torch.device) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
        with _together():
            dist.all_reduce(tensor, group=self._group)
        found: list[float] = tensor.tolist()
        return found

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all ranks."""
        return self._sum(values, _device())

    def total_array(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum of an array over all ranks."""
        tensor = torch.from_numpy(values).to(_device())
        with _together():
            dist.all_reduce(tensor, group=self._group)
        return np.asarray(tensor.cpu().numpy())

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags any rank has raised."""
        return [value > 0.0 for value in self._sum([float(f) for f in flags], _device())]

    def share(self, value: Any) -> Any:
        """Return the first rank's value."""
        box = [value]
        with _together():
            dist.broadcast_object_list(box, self._first, group=self._group, device=_device())
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order."""
        values: list[Any] = [None] * self.count
        with _together():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def join(self, packed: Packed, recurrent: Recurrent) -> Packed:
        """Put the rows of all ranks' states side by side, as one process would hold them."""
        host = [[s, None if i is None else [_to_host(x) for x in i]] for s, i in packed]
        joined: Packed = []
        for entries in zip(*self.gather(host), strict=True):
            step, first = entries[0]
            if first is None:
                joined.append([step, None])
                continue
            remaining = iter(recurrent.known_dims)
            items = []
            for parts in zip(*(items for _, items in entries), strict=True):
                dim = next(remaining) if isinstance(parts[0], Tensor) else None
                items.append(parts[0] if dim is None else torch.cat(parts, dim))
            joined.append([step, items])
        return joined

    def join_profiles(
        self, profile: LagProfile | None, alive: Flags, count: float
    ) -> tuple[LagProfile, Flags]:
        """Join what the ranks probed: one column per row of the whole batch."""
        found = self.gather((profile, alive, count))
        rows = sum(len(a) for _, a, _ in found)
        whole = sum(w for _, _, w in found)
        like = next(p for p, _, _ in found if p is not None)
        # A mean over the losses of one rank is divided by another number than that of all.
        parts = [
            like.silent(len(a)) if p is None else p.scaled(w / len(a) * rows / whole)
            for p, a, w in found
        ]
        return LagProfile.concatenate(parts), np.concatenate([a for _, a, _ in found])


def present_ranks() -> Ranks:
    """Return the processes of torch.distributed where it is initialised, else this one alone."""
    started = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Distributed() if started else Alone()


@contextmanager
def process_group(device: str = "cpu", timeout: float = 600.0) -> Iterator[str]:
    """Join the processes that `torchrun` started, if it did; yield this one's device.

    Args:
        device: cpu, or cuda for one GPU per process.
        timeout: seconds after which a rank that does not answer counts as dead.
    """
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


@contextmanager
def _together() -> Iterator[None]:
    """Say in a sentence that another process has failed."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(
            f"another process of this run has ended or does not answer ({reason})"
        ) from error


def _device() -> torch.device:
    """Return where a collective call of the default backend wants its tensors."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _to_host(item: Any) -> Any:
    return item.cpu() if isinstance(item, Tensor) else item
