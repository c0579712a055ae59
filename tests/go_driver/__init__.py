"""Tests of the Go modules ``go``, the client library, and ``examples/go-driver``, a driver that uses it.

The driver is built and run with a real agent, a fake kubelet and a fake API server.

module.py        the Go modules and the installed Go
api_server.py    the fake API server
objects.py       decoder of objects from client-go
node.py          a node with all parts
"""
