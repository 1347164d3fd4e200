"""`sdcpctl bench`: a running cluster measured from outside, with speculation and without."""
