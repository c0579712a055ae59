"""Python interface of the C core. The only package that imports cffi; no cdata leaves it."""
