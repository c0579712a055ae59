"""Chance of our own: a driver that seeds Python's common generator wants to know what comes."""

from random import SystemRandom
from typing import Final

random_fraction: Final = SystemRandom().random
"""A number from 0 to 1."""
