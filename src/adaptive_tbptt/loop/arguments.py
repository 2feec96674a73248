"""Check what you pass as truncation and number of losses, and make it uniform."""

from __future__ import annotations

from numbers import Integral, Real

from ..truncate.best_guess import BestGuess
from ..truncate.bias_tolerance import BiasTolerance
from ..truncate.controller import Controller
from ..truncate.fixed import FixedTruncation
from ..truncate.unbiased import Unbiased
from ..truncate.wrappers import Wrapper


def as_controller(truncation: Controller | float | None) -> Controller:
    """Return a controller; a number between 0 and 1 is a tolerance, a whole number is K.

    None is the recommended one, `BestGuess`.

    >>> as_controller(35)
    FixedTruncation(k=35)
    >>> as_controller(0.1).delta
    0.1
    """
    if isinstance(truncation, Wrapper) and isinstance(truncation.controller, Unbiased):
        raise TypeError(
            f"{type(truncation).__name__} changes the k that an estimate chose, and Unbiased draws "
            f"its own: pass Unbiased(..., base={type(truncation).__name__}(...))"
        )
    if truncation is None:
        return BestGuess()
    if isinstance(truncation, Controller):
        return truncation
    if isinstance(truncation, Integral) and not isinstance(truncation, bool):
        return FixedTruncation(int(truncation))
    if isinstance(truncation, Real) and not isinstance(truncation, bool):
        if not 0.0 < truncation < 1.0:
            raise ValueError(
                f"a float is the tolerated relative bias of the gradient, in (0, 1), got "
                f"{truncation}; a truncation length is a whole number, such as 35"
            )
        return BiasTolerance(delta=float(truncation))
    raise TypeError(
        "expected how to truncate: a tolerance such as 0.1, a length such as 35, or a controller "
        f"such as BiasTolerance(delta=0.1), got {type(truncation).__name__}"
    )


def check_losses(losses: int | None, losses_per_k: float | None) -> None:
    """Refuse a number of losses per window that makes no sense."""
    if losses is not None and (isinstance(losses, bool) or not isinstance(losses, Integral)):
        raise TypeError(
            f"losses is a number of steps, got {losses!r}; for a multiple of K pass "
            f"losses_per_k={losses!r}"
        )
    if losses is not None and losses < 1:
        raise ValueError(f"losses must be at least 1 step, got {losses}")
    if losses_per_k is not None and not losses_per_k > 0.0:
        raise ValueError(f"losses_per_k must be positive, got {losses_per_k}")


def check_long_windows(losses: int | None) -> None:
    """Refuse a length of long windows that is no whole number from 0 on."""
    if losses is None:
        return
    if isinstance(losses, bool) or not isinstance(losses, Integral) or losses < 0:
        raise ValueError(
            "long_windows is the number of losses of a long window, such as 160, or 0 for none; "
            f"got {losses!r}"
        )


def check_recompute(recompute: int | None) -> None:
    """Refuse a number of steps to hold that is no whole number above 0."""
    if recompute is None:
        return
    if isinstance(recompute, bool) or not isinstance(recompute, Integral):
        raise TypeError(
            "recompute is the most steps of a window to hold in memory, such as 50, or None to "
            f"hold all; got {recompute!r}"
        )
    if recompute < 1:
        raise ValueError(f"recompute must be at least 1 step, got {recompute}")


def check_controller(controller: Controller, losses: int | None, overlap: bool) -> None:
    """Refuse a controller whose windows need a number of losses that was not given."""
    if isinstance(controller, Unbiased) and (losses is None or not overlap):
        raise ValueError(
            "Unbiased draws a context for windows of a fixed length: pass the number of losses "
            "they carry, such as losses=35, and leave overlap=True"
        )
    if controller.init().k == 0 and losses is None:
        raise ValueError(
            "with a truncation length of 0 a window has no context: pass the number of losses "
            "it carries, such as losses=35"
        )
