"""The command line: one file per verb. Data goes to standard output, talk to standard error.

Nothing here is imported by the rest of the agent. The verbs import the daemon and the gRPC client when they
run, so that ``drahealth --help`` costs an interpreter and argparse.
"""
