"""From YAML files to a resolved tree that knows the file and line of every value, and back to text."""
