"""Number formats: pure numerics, no modules and no networks."""
