"""Health rules for PCI functions that drivers declare."""
