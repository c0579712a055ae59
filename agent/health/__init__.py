"""Rules, the faults that they raise, and verdicts on devices. Pure: no module reads a clock, file or
socket."""
