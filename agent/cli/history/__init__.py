"""``drahealth history``: past uses of devices by pods, and the health of the devices during these uses."""
