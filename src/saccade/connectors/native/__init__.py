"""The client for Saccade's own workers."""
