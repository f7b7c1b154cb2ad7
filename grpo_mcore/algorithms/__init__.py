"""The loops that train and evaluate, a file each."""
