"""Simulation of a fleet of nodes with faults, which checks invariants of the agent's verdicts."""
