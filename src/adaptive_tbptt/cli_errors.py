"""Errors and warnings of the command line as sentences, with an exit code that says which kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import typer
from rich.console import Console

from .errors import CheckpointError, TrainingError
from .train.interrupt import termination_as_interrupt

_debug: ContextVar[bool] = ContextVar("debug", default=False)


ERR = Console(stderr=True)


def set_debug(debug: bool) -> None:
    """Let errors through with their tracebacks, or not."""
    _debug.set(debug)


def say_warning(message: Any, *_: Any, **__: Any) -> None:
    """Stand in for `warnings.showwarning`."""
    ERR.print(f"note: {message}", highlight=False, markup=False)


def sentences(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors into sentences: exit code 2 for wrong use, 1 for trouble, 130 if stopped."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            with termination_as_interrupt():
                return command(*args, **kwargs)
        except KeyboardInterrupt:
            ERR.print("interrupted; train --resume, or the same reproduce, goes on from here")
            raise typer.Exit(130) from None
        except (ValueError, TypeError, ImportError, AssertionError) as error:
            _fail(error, 2)
        except (TrainingError, CheckpointError, OSError, RuntimeError) as error:
            _fail(error, 1)
        except Exception as error:  # one that nobody expected
            _fail(error, 1, f"{type(error).__name__}, --debug shows where: ")

    return wrapped


def _fail(error: Exception, code: int, kind: str = "") -> None:
    if _debug.get():
        raise error
    ERR.print(f"error: {kind}{error}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(code) from None
