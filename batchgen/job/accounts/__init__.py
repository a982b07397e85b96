"""What a run tells of itself when it ends: figures, totals, failures, the page."""
