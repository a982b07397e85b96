"""What a job would do, told without its weights."""
