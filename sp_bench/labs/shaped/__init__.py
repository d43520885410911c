"""Hosts on this machine whose links are shaped: made for a run, gone after it, however it ends."""
