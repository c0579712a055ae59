"""What the cgroups of a pod that has claims should say, and how what they say compares. Pure."""
