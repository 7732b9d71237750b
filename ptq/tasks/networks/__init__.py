"""The networks of the built-in tasks."""
