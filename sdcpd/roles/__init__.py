"""The roles' shells: HTTP in, machine, actions performed in order, HTTP out."""
