"""The example driver and a kubelet, end to end: a process of its own, and everything that befalls it.

    node.py          a node: its kubelet (tests/kubelet), the cluster's claims and pods, the drivers on it
    program.py       a driver as a process
    sick_driver.py   a driver that a test tells what to find; hostdev_driver finds what there is
    upstream.py      which of upstream's own cases are covered, and by which test

Where nothing else is said the host is one of plain files. What is asked of the real one stands in
``test_real_host.py`` and ``test_real_cgroups.py``, under the machine's lock.
"""
