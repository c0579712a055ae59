"""``drahealth history``: changes of verdicts, availability of devices, and their past uses by pods."""
