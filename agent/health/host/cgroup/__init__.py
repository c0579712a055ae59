"""Health rules for the cgroups of pods and containers."""
