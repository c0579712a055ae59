"""What the agent keeps on disk. Files that it cannot use are set aside, never deleted and never trusted."""
