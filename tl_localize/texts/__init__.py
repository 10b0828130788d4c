"""Texts from files and texts that come with the package, and which of them a model knows."""
