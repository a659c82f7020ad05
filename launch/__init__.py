"""Starting the server."""
