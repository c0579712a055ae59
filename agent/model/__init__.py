"""Immutable values and enums that all packages share. They use no clock, file or socket.

This package imports no other package of the agent.
"""
