"""Prompts: from a row's columns to token ids, their order, and what they will cost."""
