"""Where files lie: on a local file system, or as objects on S3-compatible storage."""
