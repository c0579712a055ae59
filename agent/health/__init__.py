"""Rules, conditions and verdicts: what is wrong with a device, and since when. Pure."""
