"""The worker's end of TokenSpeed's wire: an SMG gateway uses a Saccade worker like a TokenSpeed worker."""
