"""Scores of the agent and of other detectors on the labelled incidents of ``corpus/``."""
