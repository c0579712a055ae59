"""``drahealth checks``: the catalog of everything that the agent checks."""
