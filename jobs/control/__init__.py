"""What runs batches: slices, validate, advance, finalize, the ticker and the RQ workers."""
