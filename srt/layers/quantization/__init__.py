"""Weights in fewer bits, and how a model gets them."""
