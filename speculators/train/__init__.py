"""Training of drafts."""
