"""The agent's two programs: the daemon of ``drahealth run`` and the single scan of ``drahealth scan``."""
