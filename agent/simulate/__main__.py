"""Entry point of ``python -m agent.simulate``."""

import signal
import sys

if __name__ == "__main__":  # processes of the simulation import this module and must load nothing else
    try:
        from agent.simulate.main import main
        from agent.system.output import unbuffer_outputs

        unbuffer_outputs()
        sys.exit(main())
    except KeyboardInterrupt:  # also during imports
        sys.exit(128 + signal.SIGINT)
