"""Producers of snapshots: the native core, watchers of the host, of declarations and of pods."""
