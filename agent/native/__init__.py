"""The C core as Python sees it. The only package that imports cffi; no cdata leaves it."""
