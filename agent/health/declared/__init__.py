"""Verdicts on the devices that drivers declare, from rules for the hardware they consist of. Pure."""
