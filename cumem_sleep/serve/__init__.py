"""`cumem-sleep serve`: several models behind one OpenAI-compatible port. It speaks HTTP to servers and nothing else.

Where to look: `config` (models.yaml), `policy`, `scheduler` and `events` (what happens when; pure), `engines` (one a
file: its commands and calls), `servers` (processes), `fleet` (joins these with the clock), `front` and `page` (HTTP for
clients and people).
"""
