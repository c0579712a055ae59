"""Clients of the kubelet's own sockets."""
