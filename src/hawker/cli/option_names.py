"""Errors name what was typed: the API names fields of its JSON, the command line has options for them."""

from __future__ import annotations

import re

import click

from hawker.errors import HawkerError

OPTIONS = {
    "config.size": "guest",
    "config.guest": "guest",
    "config.guest.cpus": "cpus",
    "config.guest.cpu_kind": "cpu_kind",
    "config.guest.memory_mb": "memory",
    "limit_mb": "memory_mb",
    "config.env": "env",
    "config.metadata": "metadata",
    "config.restart.policy": "restart",
    "config.restart.max_retries": "max_retries",
    "config.runtime": "runtime",
    "config.image": "image",
    "config.files": "files",
    "config.processes.user": "user",
    "config.rootfs": "rootfs_persist",
    "config.services.ports": "ports",
    "config.services.internal_port": "ports",
    "config.services.min_machines_running": "min_running",
    "config.services.concurrency.soft_limit": "soft_limit",
    "config.services.concurrency.hard_limit": "hard_limit",
    "config.services.checks": "checks",
    "config.services.checks.interval": "check_interval",
    "config.services.checks.timeout": "check_timeout",
    "config.services.checks.grace_period": "check_grace",
    "Idempotency-Key": "key",
    "replaces": "replaces",
    "name": "name",
    "region": "region",
    "app_name": "name",
    "org_slug": "org",
}
"""The parameter of a command that sets a field of the API, by the field or a field that it is in, without the numbers
of those in lists."""


def as_typed(error: HawkerError, context: click.Context) -> None:
    """Let the error name the option or argument that set the field it is about, if it was given."""
    details = error.details if isinstance(error.details, dict) else {}
    field = details.get("field")
    if not isinstance(field, str) or not error.message.startswith(f"{field}: "):
        return
    plain = re.sub(r"\[\d+\]", "", field)
    outer = [name for name in OPTIONS if plain == name or plain.startswith(f"{name}.")]
    for name in sorted(outer, key=len, reverse=True):
        for parameter in context.command.params:
            if parameter.name == OPTIONS[name] and _given(context, OPTIONS[name]):
                told = parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.make_metavar(context)
                error.message = told + error.message.removeprefix(field)
                return


def _given(context: click.Context, parameter: str) -> bool:
    return context.get_parameter_source(parameter) is click.core.ParameterSource.COMMANDLINE
