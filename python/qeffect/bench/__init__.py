"""Figures of Transformer Engine under QEffect beside its own, on one GPU: python -m qeffect.bench (docs/te.md)."""
