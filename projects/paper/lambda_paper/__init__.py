"""Pictures of what lambda layers compute, for the figures of the paper."""
