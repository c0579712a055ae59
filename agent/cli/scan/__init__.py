"""``drahealth scan``: evaluates the node once."""
