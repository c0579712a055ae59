"""HTTP server of the agent: metrics, the page of the node, report and probes.

Needs the extra ``http``; imported only with ``--listen``.
"""
