"""Values and enums that all packages share: frozen, without clocks, files or sockets.

This package imports no other package of the agent.
"""
