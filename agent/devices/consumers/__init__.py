"""Consumers of devices: claims, pods and pod groups."""
