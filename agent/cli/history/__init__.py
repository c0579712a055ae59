"""``drahealth history``: past device usage and the health of devices during it."""
