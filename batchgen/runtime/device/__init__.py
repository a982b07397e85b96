"""The device: its streams, events and pinned memory, all owned here."""
