"""Measure points on real ranks."""
