"""The process that ``drahealth`` is, and ``python -m agent``.

It leaves with the exit code of the command line, and nothing of the interpreter's own end comes after that:
Ctrl-C could break into it, and a thread that hangs in a library hold it up for ever.
"""

import os
import signal
import traceback
from typing import Final, NoReturn

INTERRUPTED: Final = 128 + signal.SIGINT


def process() -> NoReturn:
    """Runs the command line, and leaves with its exit code."""
    try:
        # loaded here: that is half the time of most commands, and Ctrl-C may come meanwhile
        from agent.cli.main import main
        from agent.system.output import open_outputs

        open_outputs()
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:  # before anybody could say so
        traceback.print_exc()
        code = os.EX_SOFTWARE
    os._exit(code)


if __name__ == "__main__":
    process()
