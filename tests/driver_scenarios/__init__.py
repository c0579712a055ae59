"""The example driver and a kubelet, end to end: a process of its own, and everything that befalls it.

    node.py          a node: its kubelet (tests/kubelet), the cluster's claims and pods, the drivers on it
    program.py       a driver as a process
    patient.py       the limits of a driver's waits, for busy machines
    failing_driver.py   a driver that fails on request of a test; hostdev_driver serves real resources
    upstream.py      which of upstream's own cases are covered, and by which test

By default the host is a directory of plain files. Tests of the real host are in
``test_real_host.py`` and ``test_real_cgroups.py``, under the machine's lock.
"""
