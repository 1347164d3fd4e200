"""The identity matrix: the same text whatever drafts, batches and failures do (`verify-exact`)."""
