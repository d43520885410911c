"""Peers: other packages' sequence-parallel attention, run as installed. Each package has a file."""
