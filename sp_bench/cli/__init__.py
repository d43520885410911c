"""The command line: compose points with Hydra, run them, print what came out."""
