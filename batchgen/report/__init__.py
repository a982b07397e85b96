"""What the user sees of a run: progress while it lasts, a summary at its end."""
