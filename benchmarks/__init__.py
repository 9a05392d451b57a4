import os

# As the engine core has it, and before anything here loads torch, which is when OpenMP reads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
