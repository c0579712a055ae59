"""Verdicts on the devices that drivers declare, from the rules for the same parts of the host. Pure."""
