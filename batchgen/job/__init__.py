"""The phases of a job: what `run` puts together out of the packages below it."""
