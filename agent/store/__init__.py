"""Files that the agent keeps on disk over restarts. A file that it cannot use is renamed, not deleted."""
