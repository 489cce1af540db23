"""Published models: the manifest that their publisher signed, and the checks of files and servers against it."""
