"""Health rules, the faults that they raise, and verdicts on devices. Pure: no module here reads a clock, file
or socket."""
