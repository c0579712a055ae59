"""The driver of examples/go-driver, built and run: beside a real agent, under a kubelet and an API server.

module.py        the Go module, and the Go that is here
api_server.py    the API server
objects.py       what client-go sends to it
node.py          a node with all of them
"""
