"""The vocabulary: frozen values and enums that every other package speaks.

Imports nothing of ours. Nothing here reads a clock, a file or a socket.
"""
