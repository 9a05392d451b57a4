"""The queue in Redis: keys, scripts, requests, batch records, streams, workers and limits."""
