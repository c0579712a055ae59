"""HTTP server of the agent, extra ``http``: metrics, report and probes. Imported with ``--listen`` only."""
