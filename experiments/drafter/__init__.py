"""A drafter for a local model, trained on the model's own answers to tau2 prompts."""
