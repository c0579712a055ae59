"""Readers of slow or third-party sources. Fast sources are in the native core."""
