"""Verdicts on the devices that drivers declare, by the rules of the host parts that they are. Pure."""
