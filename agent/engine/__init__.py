"""The reconcile loop: one pure step from snapshot to report, and the loop that runs it."""
