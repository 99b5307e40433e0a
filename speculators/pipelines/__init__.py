"""Whole jobs made of the library's parts."""
