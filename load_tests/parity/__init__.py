"""Baselines that the product is measured against, and its counterpart of the same model."""
