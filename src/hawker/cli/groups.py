"""Groups of commands: in the order they were added, and imported only when one of them is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class Ordered(click.Group):
    """Lists its commands in the order they were added, not by the alphabet: what comes first in use comes first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class Lazy(click.Group):
    """Imports a command's module when that command is asked for. `lazy` maps a name to `module:attribute` and to the
    line that stands for it in the help, so that the help itself imports nothing."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.lazy and not args[0].startswith("-"):
            from difflib import get_close_matches  # click's own search for similar names would import every command

            near = get_close_matches(args[0], self.lazy, n=1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy.items()])
