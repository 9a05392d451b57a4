"""One model replica: claims requests, prepares and runs them, publishes and commits results."""
