"""Writing a prompt's frame in one way, so that rows share it to the byte."""
