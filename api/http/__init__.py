"""HTTP parts that routes share: bodies, errors, pages, event streams, the OpenAPI document."""
