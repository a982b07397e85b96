"""The command line: from what was typed to one checked configuration for each job."""
