"""Measure what a machine's kernels, memory and links cost, for a conf/cluster file."""
