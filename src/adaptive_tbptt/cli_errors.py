"""Errors and warnings as sentences, for the command lines of the library and of the paper.

This module needs typer and rich, the extra `cli`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import typer
from rich.console import Console

from .errors import CheckpointError, DamagedFileError, TrainingError
from .train.interrupt import termination_as_interrupt

__all__ = ["ERR", "OUT", "errors_as_sentences", "set_up", "settle_threads"]

_debug: ContextVar[bool] = ContextVar("debug", default=False)


class _Output(Console):
    """Prints text as it is, unwrapped where it is piped. Work goes on when nobody can read it."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; drop everything from the first failure on."""
        try:
            super().print(*objects, **{"soft_wrap": not self.is_terminal, **options})
        except (OSError, SystemExit):  # rich ends the process where a pipe is closed
            self.quiet = True
            # Python would fail once more, when it flushes what is left at its end.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


ERR, OUT = _Output(stderr=True), _Output()


def set_up(debug: bool = False) -> None:
    """Prepare the process for a command: memory, warnings, and whether errors show tracebacks."""
    # Torch reads this at its first tensor. Large blocks, such as the logits of a window over a
    # large vocabulary, then come in pages of 2 MiB, which are cheaper to allocate.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _debug.set(debug)
    warnings.showwarning = _show_warning


def settle_threads() -> None:
    """Leave busy cores alone, and say so; for commands that compute."""
    from ._torch.threads import use_idle_cores

    if (note := use_idle_cores()) is not None:
        ERR.print(f"note: {note}", highlight=False, soft_wrap=True)


def errors_as_sentences(
    command: Callable[..., Any], *, interrupted: str = "interrupted"
) -> Callable[..., Any]:
    """Make a command show its errors as sentences.

    The command exits with 2 after wrong use, 1 after any other error, and 130 after Ctrl-C or
    SIGTERM, when it prints `interrupted`.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            with termination_as_interrupt():
                return command(*args, **kwargs)
        except KeyboardInterrupt:
            ERR.print(interrupted)
            raise typer.Exit(130) from None
        except DamagedFileError as error:
            _fail(error, 1)
        except (ValueError, TypeError, ImportError, AssertionError) as error:
            _fail(error, 2)
        except (TrainingError, CheckpointError, OSError, RuntimeError) as error:
            _fail(error, 1)
        except Exception as error:  # unexpected: name its class
            _fail(error, 1, f"{type(error).__name__}, --debug shows where: ")

    return wrapped


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    ERR.print(f"note: {message}", highlight=False, markup=False)


def _fail(error: Exception, code: int, kind: str = "") -> None:
    if _debug.get():
        raise error
    ERR.print(f"error: {kind}{error}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(code) from None
