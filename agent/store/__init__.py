"""Files that the agent keeps on disk over restarts.

A file that the agent cannot use is renamed, not deleted.
"""
