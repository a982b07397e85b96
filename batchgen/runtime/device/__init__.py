"""The device: its streams, events, pinned memory and graphs, all owned here."""
