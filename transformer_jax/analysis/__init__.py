"""What a person wants to know about a model and a machine."""
