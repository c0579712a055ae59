"""Entry point of ``python -m agent.scoreboard``."""

import signal
import sys

if __name__ == "__main__":
    try:
        from agent.scoreboard.main import main
        from agent.system.output import unbuffer_outputs

        unbuffer_outputs()
        sys.exit(main())
    except KeyboardInterrupt:  # also during imports
        sys.exit(128 + signal.SIGINT)
