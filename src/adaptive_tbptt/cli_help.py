"""Help on two levels: `--help` shows the common options, `--help-all` every group of them.

This module needs typer, the extra `cli`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["Command", "Group", "HelpAll", "examples"]

_ALL = "adaptive_tbptt.help_all"


def _show_all(ctx: typer.Context, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="Show all options, in groups, and exit.",
    ),
]
"""The option of a command with more than a dozen options; those in a help panel are its others."""


class Command(TyperCommand):
    """A command whose help is short.

    If it has the option `--help-all`, `--help` leaves out the options that have a panel of their
    own. They are not hidden otherwise: the shell completes them.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; help comes last, so that it can tell what other options make of the defaults."""
        return super().parse_args(ctx, sorted(args, key=("--help", "--help-all").__contains__))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        parameters: list[Any] = self.get_params(ctx)
        layered = any(p.name == "help_all" for p in parameters)
        for parameter in parameters:
            panel = getattr(parameter, "rich_help_panel", None)
            parameter.hidden = bool(layered and panel and not ctx.meta.get(_ALL))
        _no_type_of_flags(parameters)
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A group of commands; `typer.Typer(cls=Group)`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands; those with commands of their own come first."""
        nested = {name for name, found in self.commands.items() if hasattr(found, "commands")}
        return sorted(super().list_commands(ctx), key=lambda name: name not in nested)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        _no_type_of_flags(self.get_params(ctx))
        super().format_help(ctx, formatter)


def _no_type_of_flags(parameters: list[Any]) -> None:
    """Show `--resume`, not `--resume <bool>`, which looks as if it took a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""


def examples(*lines: str) -> str:
    """Return the end of a help text: one example per line.

    >>> examples("atbptt diagnose mymodule:factory").splitlines()
    ['Examples:', '$ atbptt diagnose mymodule:factory']
    """
    return "\n".join(["Examples:", *(f"$ {line}" for line in lines)])
