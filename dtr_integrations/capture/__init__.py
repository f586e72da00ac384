"""The fake step: one optimizer step on tensors without data, as `core` values. Imports torch; no
framework."""
