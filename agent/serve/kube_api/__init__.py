"""Client of the Kubernetes API server: calls, lists, watches, and the claims that a driver prepares."""
