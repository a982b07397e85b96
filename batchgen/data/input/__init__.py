"""Parquet in: finding the files, checking them all, reading their rows."""
