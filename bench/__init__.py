"""Load generation and measurement over HTTP, without the engine, so that it measures anyone."""
