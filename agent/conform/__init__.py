"""Conformance checks of a DRA driver: does it behave as the kubelet expects?

``kubelet/session.py`` acts as the kubelet and records the driver's behaviour; ``check_table.py`` lists the
checks, which evaluate the record without a clock and without I/O.
"""
