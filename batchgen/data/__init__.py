"""Parquet in, Parquet out: input files, part files, resume, and what a run leaves behind."""
