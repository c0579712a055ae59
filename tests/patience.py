"""Limit of waits for events that must happen. It tests facts, not speed: a busy machine is no failure.

Nothing is asserted of how long anything took. What has not come by then is taken to hang; pytest's own limit,
in ``pyproject.toml``, is for what hangs elsewhere, and leaves time for the machine's lock and for compilers.
"""

from typing import Final

PATIENCE_S: Final = 60.0
