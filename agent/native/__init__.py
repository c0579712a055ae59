"""Python interface of the C core. The only package that imports cffi; no cffi object leaves the package."""
