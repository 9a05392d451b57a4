"""What routes share of HTTP: bodies, errors, pages, event streams, the OpenAPI document."""
