"""The event loop of agents, for tests in this process."""

from __future__ import annotations

import warnings

from hawker.agent.loop import Loop


class AgentLoop(Loop):
    """A failed test may leave connections open. uvloop warns of each as it closes it, and where warnings are errors
    never comes to its end."""

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            super().close()
