"""gRPC servers and clients of the agent, their unix sockets, the HTTPS client of the API server, and the
messages to systemd.

Nothing here evaluates a device or reads hardware: reports are sent without a change.
"""
