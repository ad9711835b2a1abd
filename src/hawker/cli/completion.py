"""`hawker completion`: click's own scripts, which ask the program for what can come next."""

from __future__ import annotations

import click

from hawker.cli import output

SHELLS = ("bash", "zsh", "fish")


@click.command(
    help="""Print the script that completes commands in your shell.

    \b
    bash:  echo 'eval "$(hawker completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(hawker completion zsh)"' >> ~/.zshrc
    fish:  hawker completion fish > ~/.config/fish/completions/hawker.fish
    """
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click has had the three since 8.0
    output.passed_on(kind(ctx.find_root().command, {}, "hawker", "_HAWKER_COMPLETE").source())
