"""Latched GPU faults: ingested, correlated, evaluated, resolved, and kept over restarts of the agent."""
