"""Engines: the target that scores proposals and the drafters that make them.

Only `model`, `kv`, `runner`, `accept`, `weights`, `target` and `drafters` import torch; `api`,
`ngram`, `scheduler`, `worker`, `tokenizer` and `fake` do not, so a router host needs no torch.
"""
