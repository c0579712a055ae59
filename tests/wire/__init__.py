"""Independent clients and servers for tests of what goes over a socket."""
