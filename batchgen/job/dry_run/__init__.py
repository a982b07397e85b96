"""What a job would do, without its weights."""
