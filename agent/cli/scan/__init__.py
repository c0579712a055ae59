"""``drahealth scan``: checks all devices of this machine once."""
