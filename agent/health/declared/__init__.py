"""Verdicts on the devices that drivers declare. The rules evaluate the hardware of each device. Pure."""
