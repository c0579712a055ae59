"""The command line: one module or package per verb. Data goes to standard output, messages to standard error.

The rest of the agent imports nothing from here. Verbs import the daemon and the gRPC client when they run, so
that ``drahealth --help`` loads little more than argparse.
"""
