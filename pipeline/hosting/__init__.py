"""Several models on one machine: their flags, their memory, and loading on demand."""
