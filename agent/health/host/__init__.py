"""Rules for the machine's devices, the cgroups of its pods, and the machine itself. Pure: no module reads a
clock, file or socket."""
