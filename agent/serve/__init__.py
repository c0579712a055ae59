"""What the agent tells the world, and how: the health stream, its own API, sockets and notifications.

Nothing here judges a device or reads hardware; reports come in whole and go out as they are.
"""
