"""The declared calls, for commands: `calls.StopMachine(...)`. They are imported when the first is made, so that no help
waits for them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # every call of these modules is a name of this one, as `__getattr__` finds it
    from hawker.model.app_calls import *  # noqa: F403
    from hawker.model.calls import *  # noqa: F403
    from hawker.model.fleet_calls import *  # noqa: F403
    from hawker.model.image_api import *  # noqa: F403
    from hawker.model.inside_api import *  # noqa: F403
    from hawker.model.machine_calls import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        for room in ("app_calls", "machine_calls", "fleet_calls", "inside_api", "image_api", "calls"):
            found = getattr(import_module(f"hawker.model.{room}"), name, None)
            if found is not None:
                return found
        raise AttributeError(name)
