"""Offline batch generation for language models: Parquet in, Parquet out."""

__version__ = "0.1.0"
