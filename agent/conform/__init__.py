"""What is said of a DRA driver to which somebody played the kubelet: observations in, a result per check out.

Pure: no clock, no I/O. ``agent.conform.kubelet.session`` makes the observations; ``table.py`` has the checks.
"""
