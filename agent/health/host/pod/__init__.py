"""Findings about pods: cgroups that differ from the expected allocation, and resource requests with risks."""
