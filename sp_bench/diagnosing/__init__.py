"""Diagnoses of a machine or an allocation: facts, and the findings that follow from them.

`seen` and `nvidia_smi` collect facts on each host, `rank_jobs` on ranks; the `judge_*` functions turn facts into
findings and touch no machine, so that tests give them the facts of machines that aren't there.
"""
