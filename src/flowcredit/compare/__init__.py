"""Several recipes at one budget: what ``flowcredit compare`` does."""
