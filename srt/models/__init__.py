"""Model families, each whole in one file."""
