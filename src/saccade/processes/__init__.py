"""Starts processes on this machine, ties them to their parent, ends them within a time limit and restarts them."""
