"""Command line of ``drahealth``: one module or package for each subcommand (verb).

Data goes to standard output, messages to standard error. Verbs import the daemon and the gRPC client when
they run, so that ``drahealth --help`` loads little more than argparse.
"""
