"""One file per suite; each has a ``run(effort)`` that returns an Outcome."""
