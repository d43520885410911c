"""Advice: which method and degree for a cluster, a model and a length, and how sure that is."""
