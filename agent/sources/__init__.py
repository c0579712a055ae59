"""Readers of slow sources: files, psutil, libudev, pynvml. Fast sources are read by the C core."""
