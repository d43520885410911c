"""Measure plans on real ranks."""
