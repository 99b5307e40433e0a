"""Train, prove and ship speculative-decoding drafts."""
