"""Fakes that several tests share."""
