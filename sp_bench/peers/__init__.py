"""Other people's sequence-parallel attention, run as installed: one file for each package, and what they share."""
