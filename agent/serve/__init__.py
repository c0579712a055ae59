"""Everything that the agent serves: the health stream, its own API, the driver link, sockets and
notifications.

Nothing here evaluates a device or reads hardware; reports are served as they are.
"""
