"""What every test gets: the line at the end that says what was skipped and why, and no deadlines.

A slow machine is no bug, so hypothesis times neither its examples nor the making of them. A shell that starts
this in the background makes it ignore SIGINT, and so would every process that a test ends with Ctrl-C.
"""

import signal

from hypothesis import HealthCheck, settings

pytest_plugins = ["plugin_skips"]

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
signal.signal(signal.SIGINT, signal.default_int_handler)
