"""Simulated kubelet that ``drahealth conform`` runs against a driver."""
