"""Programs of the agent: the daemon of ``drahealth run`` and the single scan of ``drahealth scan``."""
