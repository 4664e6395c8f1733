"""The demo: twelve tenants with real weights, served through one scheduler actor."""
