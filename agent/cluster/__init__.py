"""Health of the node's devices in the Kubernetes API: conditions of the Node, held by one agent per node."""
