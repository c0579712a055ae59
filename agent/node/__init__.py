"""Producers of snapshots: the native core, and watchers of the host, of declarations and of pods."""
