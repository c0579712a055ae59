"""Entry point of ``python -m agent.bench``."""

import signal
import sys

if __name__ == "__main__":  # multiprocessing children import this module and must load nothing else
    try:
        from agent.bench.main import main
        from agent.system.output import unbuffer_outputs

        unbuffer_outputs()
        sys.exit(main())
    except KeyboardInterrupt:  # also during imports
        sys.exit(128 + signal.SIGINT)
