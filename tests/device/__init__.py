"""What can only be shown on a GPU."""
