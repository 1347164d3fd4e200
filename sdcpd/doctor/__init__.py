"""`sdcpctl doctor`: what is wrong on this host, and in the cluster that its router sees."""
