"""Health engine: one pure step from a snapshot to a health report, and the loop that runs the step."""
