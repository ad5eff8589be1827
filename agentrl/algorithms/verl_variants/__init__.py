"""Estimators and losses that repeat verl's results, under verl's names with the suffix `_verl`."""
