"""Health of the node's devices in the Kubernetes API: Node conditions, written by one agent per node."""
