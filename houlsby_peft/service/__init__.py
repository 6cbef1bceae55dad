"""The service: adapters over HTTP, in one process or on Ray Serve."""
