"""Records of the snapshots that the health engine evaluated: file format, background recorder, and replay.

A record is a directory of files, called segments. Each segment has the evaluations of a span of time in which
the settings stayed the same.
"""
