"""The device's side of the engine: runs step plans through a stock transformers model."""
