"""What the command lines of the library and of the paper share: errors and warnings as sentences.

This module needs typer and rich, the extra `cli`.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import typer
from rich.console import Console

from .errors import CheckpointError, TrainingError
from .train.interrupt import termination_as_interrupt

__all__ = ["ERR", "errors_as_sentences", "set_up"]

_debug: ContextVar[bool] = ContextVar("debug", default=False)


ERR = Console(stderr=True)


def set_up(debug: bool = False) -> None:
    """Prepare the process for a command: memory, warnings, and whether errors show tracebacks."""
    # Torch reads this at its first tensor. Large blocks, such as the logits of a window over a
    # large vocabulary, then come in pages of 2 MiB, which are cheaper to allocate.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _debug.set(debug)
    warnings.showwarning = _show_warning


def errors_as_sentences(
    command: Callable[..., Any], *, interrupted: str = "interrupted"
) -> Callable[..., Any]:
    """Turn the errors of a command into sentences, and its exit code into the kind of error.

    The exit code is 2 for wrong use, 1 for trouble on the way, 130 if the command was stopped by
    Ctrl-C or SIGTERM.

    Args:
        command: the function behind a command.
        interrupted: what to say when the command was stopped.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            with termination_as_interrupt():
                return command(*args, **kwargs)
        except KeyboardInterrupt:
            ERR.print(interrupted)
            raise typer.Exit(130) from None
        except (ValueError, TypeError, ImportError, AssertionError) as error:
            _fail(error, 2)
        except (TrainingError, CheckpointError, OSError, RuntimeError) as error:
            _fail(error, 1)
        except Exception as error:  # one that nobody expected
            _fail(error, 1, f"{type(error).__name__}, --debug shows where: ")

    return wrapped


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    """Stand in for `warnings.showwarning`."""
    ERR.print(f"note: {message}", highlight=False, markup=False)


def _fail(error: Exception, code: int, kind: str = "") -> None:
    if _debug.get():
        raise error
    ERR.print(f"error: {kind}{error}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(code) from None
