"""Producers of the machine's snapshots: C core, and watchers of GPUs, PCI bus, declaration files and pods."""
