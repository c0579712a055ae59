"""What every test gets: the line at the end that says what was skipped and why, and no deadlines.

A slow machine is no bug, so hypothesis does not time its examples.
"""

from hypothesis import settings

pytest_plugins = ["plugin_skips"]

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
