"""Rules for PCI functions."""
