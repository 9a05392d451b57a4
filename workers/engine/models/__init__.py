"""Implement model families from the shared layers, one short file each; `registry` lists them."""
