"""Suites: one module each, with a function ``run(effort)`` that returns an Outcome."""
