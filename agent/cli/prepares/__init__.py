"""``drahealth prepares`` and ``drahealth classify``: prepare errors, their classes and codes."""
