"""The volunteer's program: downloads, relays, generates, uploads."""
