"""``drahealth explain``: which claims and pods use a device, and why a device is Unhealthy."""
