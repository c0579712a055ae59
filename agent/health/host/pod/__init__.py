"""Rules for pods: cgroups that differ from the expected allocation, and risks of their requests."""
