"""The suite's config files: Hydra's groups, a folder each."""

from sp_bench.checkout import one_name

one_name(__name__)
