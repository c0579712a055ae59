"""Health rules, the faults that they raise, and verdicts on devices.

Pure: no module here reads a clock, file or socket. A source reads one part of the machine periodically; one
such reading is a pass. In an evaluation, rules compare readings with limits. A fault that a rule detects is a
finding, with a dotted code such as ``gpu.xid.79``. A fault that is found in enough passes becomes a cause.
After the fault has ended, the cause is still reported for its probation time. The verdict on a device is its
health with all of its causes. The kubelet trusts a verdict until the lease of the verdict ends.
"""
