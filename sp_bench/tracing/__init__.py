"""Traces of torch's profiler (Kineto): made of a point, read, matched to its plans and compared with the simulator."""
