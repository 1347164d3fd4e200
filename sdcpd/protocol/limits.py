"""Every bound of the protocol core, each with its reason; defaults as in D-H7 to D-P11."""

# Integers: a CBOR uint has at most eight octets; uint32() bounds tokens and rounds (Section 4.2).
UINT_MAX = 2**64 - 1
TOKEN_MAX = 2**32 - 1
ROUND_MAX = 2**32 - 1  # a session is failed before its round number would wrap (D-A6)

# Sizes fixed by the CDDL (Section 5.2).
SESSION_ID_BYTES = 16
DIGEST_BYTES = 32
SCOPE_BYTES = 16
M_MAX = 64  # contract.m_max is "uint .le 64"

# Bodies (D-H7). Session-open and assignment may carry a whole prompt; a proposal of a few thousand
# tokens stays below its limit on purpose, so that it is told its m_cap and not only "too large".
SESSION_OPEN_BYTES_MAX = 16 * 1024 * 1024
ASSIGNMENT_BYTES_MAX = 16 * 1024 * 1024
PROPOSAL_BYTES_MAX = 1024 * 1024
BODY_BYTES_MAX = 64 * 1024
PROBLEM_BYTES_MAX = 64 * 1024  # a problem document is a few hundred octets; more is not one

# Items nested in more than this many others are refused (D-E2), so that decoding cannot exhaust
# the stack; the messages themselves need four levels.
NESTING_DEPTH_MAX = 32

# Output (D-G4, D-G7).
OUTPUT_TOKENS_MAX = 4096
OUTPUT_WAIT_S = 10.0

# Closed sessions (D-H12): verdicts and output are kept so that a peer that lost an answer gets it,
# then a tombstone so that a late peer is told "closed" and not "unknown".
CLOSED_RETENTION_S = 600.0
TOMBSTONE_S = 3600.0
SESSION_IDLE_S = 900.0  # a session without commit, assignment or proposal is failed (D-K12)

# A proposal waits this long for another of its round in verification, then gets 503 (D-P3).
ROUND_WAIT_S = 30.0

# Policies kept per session (D-Y4). The router posts one per change of preference, so a session
# that has more than this waiting for their rounds is a mistake or an attack.
POLICIES_MAX = 1024

# An instance name is percent-decoded from a path (D-R2).
INSTANCE_NAME_BYTES_MAX = 255

# Rows of draft probabilities sum to 1 within this (D-P11): binary32 rounding over a vocabulary of
# some hundred thousand tokens stays well inside, a row that was never normalised does not.
ROW_SUM_TOLERANCE = 1e-3
