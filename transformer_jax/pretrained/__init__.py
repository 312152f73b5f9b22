"""Other people's parameters, in and out."""
