"""What a change of the template would save, measured on a sample of the rows."""
