"""Emulated hosts on this machine with shaped links. They are made for a run and end with it, even if it is killed."""
