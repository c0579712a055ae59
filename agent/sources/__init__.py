"""Readers of sources that are read rarely: files, psutil, libudev, pynvml. The C core reads the others."""
