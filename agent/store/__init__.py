"""Files that the agent keeps on disk. A file that it cannot use is set aside, not deleted."""
