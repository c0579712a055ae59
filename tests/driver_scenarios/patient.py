"""A driver with patient limits: ``python -m driver_scenarios.patient MODULE FLAGS``, or a file for MODULE.

A prepare that failed waits for the disk and for the health streams, 1.5 s each, and answers without them if
they are slower. A plugin server that does not stop within 5 s is abandoned, and so are its files if the
thread that removes them gets no CPU for 0.8 s. The scenarios are about what the driver waits for, which takes
longer on a busy machine.
"""

import runpy
import sys
from typing import Final

from patience import PATIENCE_S

from agent.driver import ledger_writer, prepare_failure_tracker
from agent.embed import plugin
from agent.system.threads import worker_threads

STOP_S: Final = 20.0
"""Longest time that a plugin server has to stop, half of it for running calls [s]."""


def main() -> None:
    """Run the module or file of the driver as a program, with its own arguments."""
    ledger_writer.MAX_DISK_WAIT_S = PATIENCE_S  # type: ignore[misc]
    prepare_failure_tracker.DELIVERY_S = PATIENCE_S  # type: ignore[misc]
    plugin.END_S = STOP_S / 2  # type: ignore[misc]
    worker_threads.SHUTDOWN_S = STOP_S / 4  # type: ignore[misc]
    for stop in (plugin.PluginServer.stop, plugin.PluginServer.aclose, plugin.PluginServer._stop):
        stop.__defaults__ = (STOP_S,)
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
