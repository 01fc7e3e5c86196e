"""The worker's end of TokenSpeed's wire, which lets an SMG gateway use Saccade workers like TokenSpeed workers."""
