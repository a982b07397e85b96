"""Parquet out: parts that are there whole or not at all, resume, and what a run leaves behind."""
