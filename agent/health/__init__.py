"""Health rules, the faults that they raise, and verdicts on devices. Pure: no module here reads a clock, file
or socket.

A source reads one part of the machine periodically; one such reading is a pass. In an evaluation, rules
compare readings with limits, and a fault that a rule sees is a finding, with a dotted code such as
``gpu.xid.79``. A fault that is found often enough becomes a cause. After the fault has ended, the cause is
still reported for its probation time. The verdict on a device is its health with all of its causes; the
kubelet may use it for the time of its lease.
"""
