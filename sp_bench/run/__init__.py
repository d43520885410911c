"""Execute plans with torch.distributed and the block kernels."""
