"""Output of the command line: tables, JSON documents, the live table and the log."""
