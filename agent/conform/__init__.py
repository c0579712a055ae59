"""Tests of a DRA driver against the kubelet's contract: the record of a session goes in, a result for each
conformance check comes out.

Pure: no clock, no I/O. ``agent.conform.kubelet.session`` makes the record; ``table.py`` has the checks.
"""
