"""Parquet in (``input``), Parquet out (``output``), and where files lie (``stores``)."""
