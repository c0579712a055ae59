"""Health of GPUs: rules for readings of NVML (one module per theme), latched faults, and verdicts."""
