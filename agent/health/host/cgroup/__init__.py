"""Rules for cgroups of pods and containers."""
