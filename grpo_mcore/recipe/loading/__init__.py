"""Reads YAML files into a resolved recipe in which every value knows its file and line, and writes recipes as text."""
