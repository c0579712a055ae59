"""gRPC servers and clients of the agent, their unix sockets, and the messages to systemd.

Nothing here evaluates a device or reads hardware: reports are sent without a change.
"""
