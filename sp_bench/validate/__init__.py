"""Simulated times beside measured ones: of this machine (machine), or of what others have published (published)."""
