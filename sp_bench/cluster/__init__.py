"""Machines as data: nodes, links and devices of a cluster, as conf/cluster describes them. Nothing is executed here."""

from sp_bench.cluster.cluster import Cluster

__all__ = ["Cluster"]
