"""``python -m drahealth``: the command ``drahealth``."""

from agent.__main__ import process

if __name__ == "__main__":
    process()
