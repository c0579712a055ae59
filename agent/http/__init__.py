"""HTTP server of the agent for metrics, report and probes. Needs the extra ``http``; imported only with
``--listen``."""
