"""The sans-IO core of SDCP: messages, rules and one machine per role.

Nothing in this package awaits, reads a clock, draws a random number or logs: time and randomness
are arguments, and work to be done is returned to the shell. It imports the standard library and,
in `codec` alone, cbor2.
"""
