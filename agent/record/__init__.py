"""Records of the snapshots that the health engine evaluated: file format, background recorder, and replay."""
