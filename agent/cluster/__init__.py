"""Health of the node's devices outside the node: Lease, Node conditions, events and DeviceTaintRules in the
Kubernetes API, and health events for NVSentinel.

One agent per node writes to the API server.
"""
