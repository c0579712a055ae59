"""Rules for the node as a whole."""
