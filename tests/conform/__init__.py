"""``drahealth conform`` against drivers: good drivers pass, and bad ones get the code of their fault."""
