"""Wires that are not ours: clients that make another project's worker look like one of Saccade's."""
