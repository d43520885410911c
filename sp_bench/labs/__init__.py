"""Laboratories: clusters that are made of this machine for a run, and gone after it."""
