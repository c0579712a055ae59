"""Records of the snapshots that the health engine evaluated: file format, background recorder, and replay.

A record is a directory of files, the segments; each has the evaluations of some time, with equal settings.
"""
