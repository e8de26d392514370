"""The processes of one engine: connections between them, and what they have decided."""
