"""The order in which a template's ``fields`` list a table's columns."""
